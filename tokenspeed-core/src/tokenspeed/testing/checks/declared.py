"""What a spec declares: shapes and orders that are as stated, and an error for what it does not take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tokenspeed.testing.cases import one_call
from tokenspeed.testing.checks.values import agrees
from tokenspeed.testing.compare import error, first_difference, spell_difference
from tokenspeed.testing.inputs import CHARACTERS
from tokenspeed.testing.memory import as_bytes
from tokenspeed.testing.paged import WriteCase
from tokenspeed.testing.probes import order_probes
from tokenspeed.testing.subject import reference_subject
from tokenspeed.testing.trial import Fault, Trial, make_case, with_fact

_REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError, IndexError, AssertionError)


def traits(trial: Trial) -> Iterator[Fault]:
    """Shapes that are declared by trait are tried at both ends; declared orders are compared with their definition."""
    spec = trial.subject.spec
    for fact in trial.subject.operator.facts:
        values = sorted(value for value in spec.traits.get(fact, ()) if isinstance(value, int))
        for size in dict.fromkeys((*values[:1], *values[-1:])):
            recipe = next(trial.recipes(CHARACTERS))
            case = make_case(replace(recipe, sizes=with_fact(recipe.sizes, fact, size)))
            for fault in agrees(trial, case, one_call(case.subjects)):
                yield replace(fault, summary=f"declares {fact}={size}: {fault.summary}")
    for name, values_of in spec.traits.items():
        for value in sorted(map(str, values_of)):
            for probe in order_probes(spec.operator, name, value, trial.subject.dtypes):
                out = trial.subject.call(probe.placed(trial.subject))
                if not all(
                    torch.equal(as_bytes(a.to("cpu")), as_bytes(b)) for a, b in zip(out, probe.expected, strict=True)
                ):
                    detail = spell_difference(probe.expected, [a.to("cpu") for a in out])
                    yield Fault(f"declares {name}={value}: {probe.name}: {detail}")


def order(trial: Trial) -> Iterator[Fault]:
    """Every other kernel here with the same published order, on inputs that show another order."""
    for recipe in trial.recipes() if trial.peers else ():
        case = trial.case(recipe)
        if isinstance(case, WriteCase):
            return  # the inside of a page is the kernel's own; attention over it is compared instead
        side = one_call(case.subjects, threads=1)
        got = case.evaluate(trial.subject, side)
        for peer in trial.peers:
            expected = case.evaluate(peer, side)
            if found := first_difference(expected, got, tuple(expected)):
                owner = f"{peer.spec.name} of {peer.spec.distribution}"
                yield Fault(f"claims the order {peer.spec.bit_order} of {owner}, and differs: {found[1]}", recipe)


def refuses(trial: Trial) -> Iterator[Fault]:
    """Dtypes and shapes that are not declared: an error, or the right result."""
    yield from _undeclared_dtypes(trial)
    yield from _mismatched_shapes(trial)


def _undeclared_dtypes(trial: Trial) -> Iterator[Fault]:
    declared = [dict(signature) for signature in trial.subject.spec.signatures]
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        dtypes = dict.fromkeys(trial.subject.dtypes, dtype)
        if dtypes in declared or trial.subject.spec.stored:
            continue
        subject = replace(trial.subject, dtypes=dtypes)
        recipe = replace(next(trial.work.recipes(trial.subject)), dtypes=dtypes)
        case = make_case(recipe)
        side = one_call(case.subjects)
        try:
            if isinstance(case, WriteCase):
                continue  # what a cache holds is judged by reading it, which needs a kernel for this dtype
            got = case.evaluate(subject, side)
        except _REFUSALS:
            continue
        reference = reference_subject(subject.spec.operator, dtypes, subject.spec.machine.device)
        expected = case.evaluate(reference, side)
        operator = subject.operator
        for unit in case.subjects:
            allowed = dict(operator.agreement)["float32" if dtype in ("float64", "float32") else dtype]
            if any(error(operator, a, b) > allowed for a, b in zip(got[unit], expected[unit], strict=False)):
                yield Fault(f"takes {dtype}, which it does not declare, and gets it wrong", recipe, unit, None, side)
                return


def _mismatched_shapes(trial: Trial) -> Iterator[Fault]:
    """One element more in the last axis of the activations than the weight has."""
    roles = {"gemm.linear": "x", "gemm.batched": "x", "norm.rms": "x", "norm.add_rms": "residual"}
    role = roles.get(trial.subject.spec.operator)
    if role is None:
        return
    recipe = next(trial.work.recipes(trial.subject))
    case = trial.case(recipe)
    arguments = case.arguments(trial.subject, one_call(case.subjects))
    x = arguments[role]
    arguments[role] = torch.cat((x, x[..., :1]), dim=-1)
    try:
        trial.subject.call(arguments)
    except _REFUSALS:
        return
    yield Fault(f"takes {role} of {list(arguments[role].shape)}, which does not fit, without an error", recipe)
