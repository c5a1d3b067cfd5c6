"""Runs scenarios one after another and judges what they yield."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tokenspeed.verify.items import first_difference
from tokenspeed.verify.report import DIFFERENCES_KEPT, Finding, Result
from tokenspeed.verify.scenario import Check, Trial


class AnyScenario(Protocol):
    """What the harness reads of a scenario, whatever it runs on."""

    @property
    def name(self) -> str: ...
    @property
    def states(self) -> str: ...


Locate = Callable[[Check], str]
Listener = Callable[[Result, bool], None]
"""Called before and after every trial with the result so far, and whether the scenario is over."""


def judge(
    name: str,
    states: str,
    proof: dict[str, int],
    trials: Iterable[Trial],
    *,
    locate: Locate | None = None,
    listener: Listener = lambda _result, _over: None,
) -> Result:
    """Go through the trials of one scenario.

    The first difference is located with `locate`, which may run things again. An exception ends the scenario as failed.
    """
    result = Result(name, states, proof)
    started = time.monotonic()
    listener(result, False)
    try:
        for trial in trials:
            result.evidence.update(trial.evidence)
            _judge_checks(result, trial.checks, locate)
            result.seconds = time.monotonic() - started
            listener(result, False)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
    result.seconds = time.monotonic() - started
    listener(result, True)
    return result


def _judge_checks(result: Result, checks: Sequence[Check], locate: Locate | None) -> None:
    for check in checks:
        result.compared += 1
        result.tokens += len(check.got.token_ids) or len(check.got.prompt_bits)
        difference = first_difference(check.item, check.expected, check.got)
        if difference is None:
            continue
        result.differing += 1
        if len(result.findings) < DIFFERENCES_KEPT:
            place = locate(check) if locate is not None and not result.findings else ""
            result.findings.append(Finding(check.item.name, difference, place))
