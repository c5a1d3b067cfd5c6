"""The short form of the kit that runs before a start under `rl-bitwise`: the chosen kernels, at the model's own shapes.

It is an alarm and no proof: `tokenspeed kernels verify` tries far more. What passed once in this process is not tried
again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.errors import Problem
from tokenspeed.kernels.spec import KernelSpec, Need
from tokenspeed.machine import Machine
from tokenspeed.numerics.plan import Plan
from tokenspeed.testing.checks import first_fault
from tokenspeed.testing.names import KIT_VERSION, applies
from tokenspeed.testing.subject import load_peers, load_subject
from tokenspeed.testing.trial import FACT_AXES, Fault, Trial, Workload

CHECKS_AT_START = ("order", "initialised", "batch", "layout", "history", "threads")

BATCH_SIZES_AT_START = (2, 9, 33)

LARGEST = {"E": 8, "F": 128, "G": 4, "H": 4096, "K": 4096, "N": 64, "Hi": 20, "Hq": 16, "k": 40}
"""Bounds on the sizes of a model, so that a start stays short; what counts is the inner size of a sum."""

_passed: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class Proof:
    """What the short form found: the kernels that were tried, and a problem for each that breaks its claim."""

    kernels: tuple[str, ...]
    seconds: float
    problems: tuple[Problem, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For the certificate's provenance."""
        return {
            "version": KIT_VERSION,
            "checks": list(CHECKS_AT_START),
            "kernels": list(self.kernels),
            "result": "failed" if self.problems else "passed",
        }


def prove(plan: Plan, installed: Iterable[KernelSpec] = ()) -> Proof:
    """Try every chosen kernel of a plan; they can be imported, since the plan is bound.

    `installed` are all kernels: one that publishes the order of a chosen kernel must give its bits.
    """
    started = time.perf_counter()
    kernels = plan.kernels()
    others = tuple(installed) or kernels
    problems = []
    for spec in kernels:
        needs = [need for need, chosen in plan.choices.items() if chosen is spec]
        found = (_problem(spec, group, others, plan.machine) for group in _by_signature(spec, needs))
        problem = next(filter(None, found), None)
        if problem is not None:
            problems.append(problem)
    return Proof(tuple(spec.name for spec in kernels), time.perf_counter() - started, tuple(problems))


def _by_signature(spec: KernelSpec, needs: Iterable[Need]) -> list[tuple[Mapping[str, str], list[Need]]]:
    """The needs of each dtype signature."""
    groups: dict[int, list[Need]] = {}
    for need in needs:
        fits = (all(s.get(role) == dtype for role, dtype in need.dtypes) for s in spec.signatures)
        groups.setdefault(next(at for at, fit in enumerate(fits) if fit), []).append(need)
    return [(spec.signatures[at], group) for at, group in groups.items()]


def sizes_of(need: Need) -> dict[str, int]:
    """The sizes that the facts of a need speak of, bounded."""
    facts = {name: value for name, value in need.facts if isinstance(value, int)}
    sizes = {FACT_AXES[name]: value for name, value in facts.items() if name in FACT_AXES}
    if "group_size" in facts:
        sizes |= {"Hkv": 1, "Hq": facts["group_size"]}
    if "width" in facts and "latent_dim" not in facts:  # what is written is read back as a latent part and a key
        sizes["R"] = facts["width"] // 2
    return {axis: min(size, LARGEST.get(axis, size)) for axis, size in sizes.items()}


def _problem(
    spec: KernelSpec, group: tuple[Mapping[str, str], Sequence[Need]], others: Sequence[KernelSpec], machine: Machine
) -> Problem | None:
    dtypes, needs = group
    distinct = {tuple(sorted(sizes_of(need).items())) for need in needs}
    # The shortest and the longest sum stand for those between.
    ordered = sorted(distinct, key=lambda sizes: sum(size for _, size in sizes))
    shapes = tuple(dict(sizes) for sizes in dict.fromkeys((ordered[0], ordered[-1])))
    subject = load_subject(spec, dtypes, others)
    peers = load_peers(spec, dtypes, others, machine)
    runs = (subject.run, *(peer.run for peer in peers))
    key = (spec.name, runs, tuple(sorted(dtypes.items())), ordered[0], ordered[-1])
    if key in _passed:
        return None
    fault = _first(Trial(subject, Workload(BATCH_SIZES_AT_START, few=True, shapes=shapes), peers))
    if fault is None:
        _passed.add(key)
        return None
    check, found = fault
    return Problem(
        "unproved-kernel",
        f"kernel {spec.name} of {spec.distribution} {spec.version} does not keep what it declares "
        f"({', '.join(sorted(spec.features))})",
        (f"{check}: {found.summary}", *((f"inputs: {found.recipe.describe()}",) if found.recipe else ())),
        f"pin another kernel with --kernel {spec.operator}=NAME; the smallest input that shows it is saved by "
        f"`tokenspeed kernels verify --kernel {spec.name}`",
    )


def _first(trial: Trial) -> tuple[str, Fault] | None:
    for check in CHECKS_AT_START:
        if applies(check, trial.subject.spec) and (fault := first_fault(check, trial)):
            return check, fault
    return None
