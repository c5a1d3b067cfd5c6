"""How far a long command is: a live line on a terminal, elsewhere a plain line on standard error now and then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Self, TypeVar

import click
from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.status import Status

from tokenspeed.progress import is_wanted

Item = TypeVar("Item")

HEARTBEAT_SECONDS = 20.0
"""How long a command that no terminal shows may be silent."""


class Heartbeat:
    """Says on standard error, every `HEARTBEAT_SECONDS`, what is going on and for how long.

    So a log shows that a command which takes long is alive, and a short one prints nothing.
    """

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def say(self, text: str) -> None:
        """What is going on from now on."""
        self._text = text

    def start(self) -> None:
        self._started = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more
                click.echo(f"[{time.monotonic() - self._started:6.0f} s] {self._text}", err=True)


class Shown:
    """A context manager that shows `_live` meanwhile."""

    _live: Progress | Live | Status | Heartbeat | None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


class Counting(Shown):
    """How many of `total` have been done (None: nobody knows how many there are). Use as a context manager."""

    def __init__(self, what: str, total: int | None, *, hidden: bool = False) -> None:
        self._what = what
        self._total = total
        self._done = 0
        console = Console(stderr=True)
        if hidden:
            self._live = None
        elif console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._live = Progress(*columns, console=console, transient=True)
            self._live.add_task(what, total=total)
        else:
            self._live = Heartbeat(what)

    def advance(self, count: int = 1) -> None:
        """So many more have been done."""
        self.reach(self._done + count)

    def reach(self, done: int, _total: int = 0) -> None:
        """So many have been done."""
        self._done = done
        if isinstance(self._live, Progress):
            self._live.update(self._live.task_ids[0], completed=self._done)
        elif isinstance(self._live, Heartbeat):
            of = "" if self._total is None else f" of {self._total}"
            self._live.say(f"{self._what}: {self._done}{of}")


def counted(items: Iterable[Item], what: str) -> Iterator[Item]:
    """`items`, and how many of them have been gone through."""
    with Counting(what, len(items) if isinstance(items, Sized) else None) as counting:
        for item in items:
            yield item
            counting.advance()


class StartProgress(Shown):
    """Call it with (stage, done, in all); `in all` 0 means that nothing is counted. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._stage = ""
        self._live: Progress | Heartbeat = Heartbeat()
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            self._live = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `stage` is going on."""
        is_new, self._stage = stage != self._stage, stage
        if isinstance(self._live, Heartbeat):
            self._live.say(_staged(stage, done, total))
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


def _staged(stage: str, done: int, total: int) -> str:
    return f"{stage}: {done / total:.0%}" if total else stage


@contextmanager
def start_progress(choice: bool | None = None) -> Iterator[StartProgress | None]:
    """On standard error, if `choice` says so (None: if that is a terminal); else None."""
    if not is_wanted(choice):
        yield None
        return
    with StartProgress(Console(stderr=True)) as progress:
        yield progress


class Doing(Shown):
    """Call it with what is going on. Use as a context manager."""

    def __init__(self, what: str = "") -> None:
        console = Console(stderr=True)
        self._live: Status | Heartbeat = console.status(what) if console.is_terminal else Heartbeat(what)

    def __call__(self, what: str) -> None:
        if isinstance(self._live, Heartbeat):
            self._live.say(what)
        else:
            self._live.update(what)


class Waiting(Shown):
    """While something runs that shows itself on a terminal, as `LLM` does: elsewhere `what` is said now and then."""

    def __init__(self, what: str) -> None:
        self._live = None if is_wanted(None) else Heartbeat(what)


@contextmanager
def loading() -> Iterator[StartProgress | Callable[[str, int, int], None]]:
    """`start_progress` for a command that shows a start on a terminal only, and is not silent for long elsewhere."""
    with start_progress() as progress:
        if progress is not None:
            yield progress
            return
        with Doing("loading the model") as doing:
            yield lambda stage, done, total: doing(_staged(stage, done, total))
