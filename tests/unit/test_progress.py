"""A long command that no terminal shows says on standard error, now and then, how far it is; a short one nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from tokenspeed.cli import progress
from tokenspeed.cli.progress import Counting, Doing, StartProgress, Waiting, counted, loading
from tokenspeed.cli.verify_display import VerifyDisplay
from tokenspeed.progress import request_progress
from tokenspeed.verify.harness import judge
from tokenspeed.verify.scenario import Trial


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.02)


def one_by_one() -> None:
    for _ in counted(range(3), "measuring"):
        time.sleep(0.1)


def some_of_many() -> None:
    with Counting("requests", 7) as counting:
        counting.advance()
        counting.reach(5)
        time.sleep(0.1)


def checks() -> None:
    with Doing() as doing:
        doing("aok.gemm.linear: batch")
        time.sleep(0.1)


def a_start() -> None:
    with loading() as report:
        report("loading weights", 1, 4)
        time.sleep(0.1)


def a_served_start() -> None:
    with StartProgress(Console(stderr=True)) as report:
        report("loading weights", 3, 4)
        time.sleep(0.1)


def a_library() -> None:
    with Waiting("loading the model"):
        time.sleep(0.1)


def many_prompts() -> None:
    with request_progress(9, True) as advance:
        advance(50, 0)
        advance(50, 3)
        time.sleep(0.1)


def a_verification() -> None:
    def trials() -> Iterator[Trial]:
        time.sleep(0.1)
        yield Trial([])

    with VerifyDisplay(Console(stderr=True)) as display:
        judge("chunks", "whole = chunks", {}, trials(), listener=display)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (one_by_one, "measuring: 1 of 3"),
        (some_of_many, "requests: 5 of 7"),
        (checks, "aok.gemm.linear: batch"),
        (a_start, "loading weights: 25%"),
        (a_served_start, "loading weights: 75%"),
        (a_library, "loading the model"),
        (many_prompts, "prompts: 3 of 9"),
        (a_verification, "chunks: whole = chunks, 0 replies so far"),
    ],
)
@pytest.mark.usefixtures("fast")
def test_a_long_command_says_how_far_it_is(
    command: Callable[[], None], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command()
    out, err = capsys.readouterr()
    assert out == ""
    assert f"[     0 s] {line}\n" in err


def test_a_short_command_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    list(counted(range(3), "measuring"))
    with Waiting("loading the model"), Counting("requests", 7, hidden=True) as counting:
        counting.advance()
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("fast")
def test_nobody_reads_it_any_more(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    with Doing("checking"):
        monkeypatch.setattr(sys, "stderr", Closed())
        time.sleep(0.1)
        monkeypatch.undo()
    assert capsys.readouterr().out == ""
