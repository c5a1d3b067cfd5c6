"""Printing for people and for programs: tables on a terminal, JSON on request. Imports rich only to print a table."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def check_writable(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
    """For options that name a file to write when a command ends: find out now if that can be, and leave nothing there.

    `value` is a path, or a file of click's, which opens it at the first write.
    """
    name = value if isinstance(value, Path) else getattr(value, "name", None)
    if isinstance(name, str | Path) and str(name) not in ("-", "<stdout>") and (fault := unwritable(Path(name))):
        raise click.BadParameter(f"{str(name)!r}: {fault}")
    return value


def unwritable(path: Path, *, makes_folders: bool = False) -> str | None:
    """Why no file can be written at `path`; None when it can. `makes_folders`: those that it is in may be missing."""
    try:
        if path.exists():
            if path.is_dir():
                return os.strerror(errno.EISDIR)
            return None if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
        if makes_folders and not path.parent.exists():
            folder = next(parent for parent in path.parents if parent.exists())
            if not folder.is_dir():
                return os.strerror(errno.ENOTDIR)
            return None if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        path.unlink()
    except OSError as error:
        return error.strerror
    return None


PLAIN_WIDTH = 200
"""Columns when the output is no terminal: wide, so that a pipe does not get wrapped names."""

GAP = 2
"""Blanks between the columns of a table."""


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def console(*, stderr: bool = False) -> Console:
    """Standard output (or error) as a rich console. What its encoding cannot spell is shown as `?`, no error."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    plain = Console(width=PLAIN_WIDTH, stderr=stderr)
    return Console(stderr=stderr) if plain.is_terminal else plain


def print_rich(*parts: RenderableType) -> None:
    """Each part on standard output."""
    out = console()
    for part in parts:
        out.print(part)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, wrapped: Collection[str] = ()) -> None:
    """A plain table. Only cells of the columns in `wrapped` are broken over several lines where space is short.

    Nothing is ever cut off: where not even that is enough, the other columns are broken, too.
    """
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    cells = list(zip(columns, *rows, strict=True))
    widths = [max(map(len, column)) for column in cells]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in cells]
    least = [word if column[0] in wrapped else width for column, width, word in zip(cells, widths, words, strict=True)]
    room = console().width - GAP * (len(columns) - 1)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column, width in zip(columns, narrowed(narrowed(widths, least, room), [1] * len(columns), room), strict=True):
        table.add_column(column, overflow="fold", width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    print_rich(table)


def narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that add up to `room`, taken from the widest first and none below its least, as far as possible."""
    widths = list(widths)
    while sum(widths) > room:
        wide = [at for at in range(len(widths)) if widths[at] > least[at]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values below each other, indented; long values hang."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, GAP))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    print_rich(Padding(table, (0, 0, 1, 2), expand=False))
