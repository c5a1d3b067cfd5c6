"""The checks: each takes a `Trial` and yields what is wrong with its kernel, smallest inputs first.

`names.py` says what each proves; the modules here are sorted by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from tokenspeed.testing.checks.bits import batch, history, layout, threads
from tokenspeed.testing.checks.declared import order, refuses, traits
from tokenspeed.testing.checks.memory import initialised, writes
from tokenspeed.testing.checks.values import accumulation, agreement, empty
from tokenspeed.testing.memory import circumstances
from tokenspeed.testing.trial import Fault, Trial

Checker = Callable[[Trial], Iterable[Fault]]

CHECKERS: Mapping[str, Checker] = {
    "agreement": agreement,
    "accumulation": accumulation,
    "empty": empty,
    "writes": writes,
    "initialised": initialised,
    "refuses": refuses,
    "traits": traits,
    "order": order,
    "batch": batch,
    "layout": layout,
    "history": history,
    "threads": threads,
}
"""How each check of `names.CHECKS` is done; `import` is done by whoever makes the `Subject`."""


def first_fault(check: str, trial: Trial) -> Fault | None:
    """The first fault that a check finds; what a kernel raises is one, too."""
    with circumstances(threads=1), torch.inference_mode():
        try:
            if trial.promises_bits:
                trial.first_results()
            return next(iter(CHECKERS[check](trial)), None)
        except Exception as error:  # a kernel may raise anything
            return Fault(f"{type(error).__name__}: {error}")
