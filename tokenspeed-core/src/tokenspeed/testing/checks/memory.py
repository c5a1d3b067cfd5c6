"""Where a kernel reads and writes: its arguments are left alone, its outputs fresh and complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from tokenspeed.testing.cases import Case, Side, one_call
from tokenspeed.testing.checks.values import agrees
from tokenspeed.testing.compare import first_difference
from tokenspeed.testing.inputs import LOUD, Recipe
from tokenspeed.testing.memory import Placed, as_bytes, place
from tokenspeed.testing.paged import FAMILIES
from tokenspeed.testing.trial import Fault, Trial


def writes(trial: Trial) -> Iterator[Fault]:
    """Guards around every argument, and outputs that share no memory with an argument or an earlier output."""
    for recipe in trial.recipes():
        case = trial.case(recipe)
        whole = one_call((*case.subjects, *case.neighbours))
        arguments = case.arguments(trial.subject, whole)
        guarded: dict[str, Placed] = {}
        written = set(FAMILIES[recipe.operator].caches) if trial.writes_cache else set()
        for role, value in arguments.items():
            if isinstance(value, torch.Tensor):
                guarded[role] = place(value, "plain")
                arguments[role] = guarded[role].view
        before = {role: placed.view.clone() for role, placed in guarded.items() if role in written}
        out = trial.subject.call(arguments)
        for role, placed in guarded.items():
            if role in written:
                slots = arguments["slots"]
                yield from _wrote_elsewhere(recipe, role, placed, before[role], slots)
            elif not placed.untouched():
                yield Fault(f"wrote to its argument {role}, or to memory around it", recipe)
        yield from _shared_memory(trial, recipe, case, guarded, out)


def _wrote_elsewhere(
    recipe: Recipe, role: str, placed: Placed, before: torch.Tensor, slots: torch.Tensor
) -> Iterator[Fault]:
    pages = {int(slot) // before.shape[1] for slot in slots.tolist() if slot >= 0}
    others = [page for page in range(len(before)) if page not in pages]
    if not torch.equal(as_bytes(placed.view[others]), as_bytes(before[others])):
        yield Fault(f"wrote to pages of {role} that no slot names", recipe)
    inside = placed.view.numel() * placed.view.element_size()
    start = placed.view.storage_offset() * placed.view.element_size()
    now, then = as_bytes(placed.buffer), placed.before
    around = torch.cat((now[:start], now[start + inside :])), torch.cat((then[:start], then[start + inside :]))
    if not torch.equal(*around):
        yield Fault(f"wrote around {role}", recipe)


def _shared_memory(
    trial: Trial, recipe: Recipe, case: Case, guarded: Mapping[str, Placed], out: tuple[torch.Tensor, ...]
) -> Iterator[Fault]:
    owned = {placed.buffer.untyped_storage().data_ptr(): role for role, placed in guarded.items()}
    for number, tensor in enumerate(out):
        role = owned.get(tensor.untyped_storage().data_ptr())
        if tensor.numel() and role is not None:
            yield Fault(f"output {number} is a view of its argument {role}", recipe)
    kept = [tensor.clone() for tensor in out]
    reversed_side = one_call((*case.subjects, *case.neighbours)[::-1])
    trial.subject.call(case.arguments(trial.subject, reversed_side))
    if any(not torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(kept, out, strict=True)):
        yield Fault("a later call changed the output of an earlier one", recipe)


def initialised(trial: Trial) -> Iterator[Fault]:
    """Fresh memory full of NaN, and of large numbers; unwritten cache slots likewise."""
    for recipe in trial.recipes(("plain",)):
        case = trial.case(recipe)
        # The NaN mode of torch imports its compiler, which takes seconds.
        kinds = (("large", LOUD),) if trial.work.few else (("nan", float("nan")), ("large", LOUD))
        for fresh, filler in kinds:
            for units in (case.subjects, case.subjects[:1], case.subjects[:3]):
                side = Side((tuple(units),), fresh=fresh, filler=filler)  # type: ignore[arg-type]
                if trial.promises_bits and not trial.writes_cache:
                    yield from _unmoved(trial, case, replace(side, fresh="as it comes", filler=0.0), side)
                else:
                    yield from agrees(trial, case, side)


def _unmoved(trial: Trial, case: Case, before: Side, after: Side) -> Iterator[Fault]:
    """A fault when what fresh memory holds changes the bits of the same call."""
    expected, got = case.evaluate(trial.subject, before), case.evaluate(trial.subject, after)
    if found := first_difference(expected, got, tuple(expected)):
        unit, detail = found
        yield Fault(f"with {after.fresh} in fresh memory: unit {unit}: {detail}", case.recipe, unit, before, after)
