"""Printing for people and for programs: tables on a terminal, JSON on request. Imports rich only to print a table."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 200
"""Columns when the output is no terminal: wide, so that a pipe does not get wrapped names."""


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def console(*, stderr: bool = False) -> Console:
    """Standard output (or error) as a rich console."""
    from rich.console import Console

    plain = Console(width=PLAIN_WIDTH, stderr=stderr)
    return Console(stderr=stderr) if plain.is_terminal else plain


def print_rich(*parts: RenderableType) -> None:
    """Each part on standard output."""
    out = console()
    for part in parts:
        out.print(part)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, wrapped: Collection[str] = ()) -> None:
    """A plain table. Only cells of the columns in `wrapped` are broken over several lines where space is short."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in wrapped)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    print_rich(table)
