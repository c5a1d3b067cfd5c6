"""What a kernel computes, beside the reference: its values, the precision of its sums, and nothing from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tokenspeed.kernels.spec import PER_REQUEST, STREAM
from tokenspeed.testing.cases import Case, Side, one_call
from tokenspeed.testing.compare import differing, error, is_close_call, may_be_drawn, spell_difference, tolerance
from tokenspeed.testing.inputs import Recipe
from tokenspeed.testing.paged import WriteCase
from tokenspeed.testing.probes import probes
from tokenspeed.testing.trial import FEW, Fault, Trial, declared_sizes


def agreement(trial: Trial) -> Iterator[Fault]:
    """Every character of values at every size, whole batches, against the reference."""
    for recipe in trial.work.recipes(trial.subject):
        case = trial.case(recipe)
        yield from agrees(trial, case, one_call(case.subjects if trial.subject.is_paged else case.subjects[:FEW]))


def agrees(trial: Trial, case: Case, side: Side, measure: float | None = None) -> Iterator[Fault]:
    if isinstance(case, WriteCase):
        everything = replace(side, calls=((*case.subjects, *case.neighbours),))
        got, expected = case.read_back(trial.subject, everything), case.read_back(trial.reference, everything)
    else:
        got, expected = case.evaluate(trial.subject, side), case.evaluate(trial.reference, side)
    for unit in (unit for unit in expected if unit in case.subjects or unit in got):
        if len(got[unit]) != len(expected[unit]):
            yield Fault(f"{len(got[unit])} outputs, expected {len(expected[unit])}", case.recipe, unit, None, side)
            return
        for a, b in zip(got[unit], expected[unit], strict=True):
            allowed = tolerance(trial.subject.operator, b.dtype) if measure is None else measure
            off = error(trial.subject.operator, a, b)
            if off > allowed and not _close_call(trial, case, side, unit, a):
                how = f"off by {off:.3g}, allowed {allowed:.3g}; " if off < float("inf") else ""
                detail = spell_difference((b,), (a,))
                yield Fault(f"unit {unit}: {how}{detail}", case.recipe, unit, None, side)
                return


def _close_call(trial: Trial, case: Case, side: Side, unit: int, chosen: torch.Tensor) -> bool:
    if trial.subject.spec.operator != "sampling.sample" or chosen.dim():
        return False
    arguments, row = case.arguments(trial.reference, side), side.calls[0].index(unit)
    if PER_REQUEST not in trial.subject.spec.traits.get(STREAM, (PER_REQUEST,)):
        return may_be_drawn(arguments, row, int(chosen))
    return is_close_call(trial.reference.run, arguments, row, int(chosen))


def accumulation(trial: Trial) -> Iterator[Fault]:
    """Values whose sum is exact in fp32 in any order, and wrong in anything narrower."""
    if trial.subject.is_paged:
        if trial.subject.spec.operator == "attention.paged":
            recipe = Recipe(
                "attention.paged",
                {"Hq": 2, "Hkv": 1, "D": 16},
                trial.subject.dtypes,
                "accumulation",
                {"window": 0, "lengths": (1, 1200)},
            )
            case = trial.case(declared_sizes(recipe, trial.subject.spec))
            yield from agrees(trial, case, one_call(case.subjects[-1:]))
        return
    for probe in probes(trial.subject.spec.operator, trial.subject.dtypes):
        if not probe.survives(trial.subject):
            continue
        out = trial.subject.call(probe.placed(trial.subject))
        for a, b in zip(out, probe.expected, strict=True):
            off = error(trial.subject.operator, a.to("cpu"), b)
            # What a weight format holds is exact but for the rounding of its scale.
            if off > (tolerance(trial.subject.operator, b.dtype) if trial.subject.quantise else probe.measure):
                yield Fault(f"{probe.name}: {spell_difference((b,), (a.to('cpu'),))}")
                return


def empty(trial: Trial) -> Iterator[Fault]:
    """A call without units."""
    recipe = next(trial.work.recipes(trial.subject))
    case = trial.case(recipe)
    side = Side(((),))
    if trial.writes_cache:
        untouched = case.evaluate(trial.subject, Side(()))
        yield from (
            Fault("writing nothing changed the cache", recipe)
            for _ in differing(untouched, case.evaluate(trial.subject, side), [0])
        )
        return
    out = trial.subject.call(case.arguments(trial.subject, side))
    expected = trial.reference.call(case.arguments(trial.reference, side))
    shapes = [(list(t.shape), t.dtype) for t in out], [(list(t.shape), t.dtype) for t in expected]
    if shapes[0] != shapes[1]:
        yield Fault(f"without rows the outputs are {shapes[0]}, expected {shapes[1]}", recipe)
