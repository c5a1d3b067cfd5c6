"""Progress on standard error: a start's stages and a list of prompts. Silent unless wanted or on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

SHOW_AFTER_SECONDS = 1.0
"""A job that takes less shows nothing."""

Stage = Callable[[str, int, int], None]
Advance = Callable[[int, int], None]


def is_wanted(choice: bool | None) -> bool:
    """An explicit choice, or whether standard error is a terminal."""
    return sys.stderr.isatty() if choice is None else choice


@contextmanager
def start_progress(choice: bool | None = None) -> Iterator[Stage]:
    """`report(stage, done, total)`: one line for each stage, with a bar where the total is known."""
    if not is_wanted(choice):
        yield lambda _stage, _done, _total: None
        return
    bars = _progress()
    tasks: dict[str, int] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total or None)
        bars.update(tasks[stage], completed=done, total=total or None)  # type: ignore[arg-type]

    with bars:
        yield report


@contextmanager
def request_progress(total: int, choice: bool | None = None) -> Iterator[Advance]:
    """`advance(tokens, prompts)` after each update; the bar appears once the job has taken a second."""
    if not is_wanted(choice):
        yield lambda _tokens, _prompts: None
        return
    bars = _progress()
    started = time.monotonic()
    task = bars.add_task("generating", total=total, visible=True)
    tokens_done = 0
    shown = False

    def advance(tokens: int, prompts: int) -> None:
        nonlocal shown, tokens_done
        tokens_done += tokens
        elapsed = time.monotonic() - started
        if not shown and elapsed > SHOW_AFTER_SECONDS:
            bars.start()
            shown = True
        if shown or prompts:
            rate = tokens_done / max(elapsed, 1e-9)
            bars.update(task, advance=prompts, description=f"generating, {rate:,.0f} tokens/s")

    try:
        yield advance
    finally:
        if shown:
            bars.stop()


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
