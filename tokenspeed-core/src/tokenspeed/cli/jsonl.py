"""Lines of JSON in, lines of JSON out, in the order in which they came in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import click
import msgspec

from tokenspeed.cli.output import check_writable
from tokenspeed.errors import RequestError


def read_lines(source: BinaryIO, *, fields: Iterable[str]) -> list[dict[str, Any]]:
    """One object for each line that is not blank. Raises RequestError, with the line, for anything else.

    `fields` are the keys that a line may have besides `id`, which is handed through.
    """
    known = {*fields, "id"}
    rows = []
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RequestError(f"line {number} is {type(row).__name__}; expected an object")
        if unknown := row.keys() - known:
            raise RequestError(
                f"line {number}: unknown {', '.join(sorted(unknown))}; a line may hold {', '.join(sorted(known))}"
            )
        rows.append({**row, "line": number})
    return rows


@contextmanager
def at_line(row: dict[str, Any]) -> Iterator[None]:
    """Say in a RequestError which line it is about."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"line {row['line']}: {error}", param=error.param, code=error.code) from error


def report_failures(failed: int, count: int) -> None:
    """Raise RequestError when samples have failed, once all lines are written: the exit status must not hide it."""
    if failed:
        raise RequestError(f"{failed} of {count} samples failed; `error` in their lines says why")


class OrderedLines:
    """Writes row `index` as soon as all rows before it are written. Infinite numbers become null."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._next = 0
        self._ready: dict[int, dict[str, Any]] = {}

    def write(self, index: int, row: dict[str, Any]) -> None:
        """Hand over one row."""
        self._ready[index] = row
        while self._next in self._ready:
            self._out.write(msgspec.json.encode(self._ready.pop(self._next)) + b"\n")
            self._next += 1
        self._out.flush()


input_option = click.option(
    "--input", "-i", "source", type=click.File("rb"), default="-", help="JSONL to read; standard input if not given."
)
output_option = click.option(
    "--output",
    "-o",
    "out",
    type=click.File("wb"),
    default="-",
    callback=check_writable,
    help="JSONL to write; standard output if not given.",
)
progress_option = click.option(
    "--progress/--no-progress", default=None, help="Show progress on standard error; on a terminal if not given."
)
