"""What a start is doing, as it does it: a live line on a terminal, one plain line for each stage elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, track

from tokenspeed.progress import is_wanted

Item = TypeVar("Item")


def counted(items: Iterable[Item], what: str) -> Iterable[Item]:
    """`items`, with a bar on standard error while they are gone through, if that is a terminal."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


class Shown:
    """A context manager that shows `_live` meanwhile, which is None where nobody watches."""

    _live: Progress | Live | None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


class StartProgress(Shown):
    """Call it with (stage, done, in all); `in all` 0 means that nothing is counted. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._stage = ""
        self._live: Progress | None = None
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            self._live = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `stage` is going on."""
        is_new, self._stage = stage != self._stage, stage
        if self._live is None:
            if is_new:
                self._console.print(
                    f"[{time.monotonic() - self._started:6.2f} s] {stage}", highlight=False, markup=False
                )
            return
        if is_new:
            for task in self._live.task_ids:
                self._live.remove_task(task)
            self._live.add_task(stage, total=total or None)
        self._live.update(self._live.task_ids[-1], completed=done, total=total or None)


@contextmanager
def start_progress(choice: bool | None = None) -> Iterator[StartProgress | None]:
    """On standard error, if `choice` says so (None: if that is a terminal); else None."""
    if not is_wanted(choice):
        yield None
        return
    with StartProgress(Console(stderr=True)) as progress:
        yield progress
