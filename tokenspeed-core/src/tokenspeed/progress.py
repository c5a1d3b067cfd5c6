"""The progress of a list of prompts on standard error: silent unless wanted, or on a terminal and long."""

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

Advance = Callable[[int, int], None]


def is_wanted(choice: bool | None) -> bool:
    """An explicit choice, or whether standard error is a terminal."""
    return sys.stderr.isatty() if choice is None else choice


@contextmanager
def request_progress(total: int, choice: bool | None = None) -> Iterator[Advance]:
    """`advance(tokens, prompts)` after each update; the bar appears once the job has taken a second.

    Who wants it without a terminal gets a plain line now and then.
    """
    if not is_wanted(choice):
        yield lambda _tokens, _prompts: None
        return
    if not sys.stderr.isatty():
        from tokenspeed.cli.progress import Counting

        with Counting("prompts", total) as counting:
            yield lambda _tokens, prompts: counting.advance(prompts)
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
