"""Which kernel serves which need: a pure function that leaves a verdict with a reason for every candidate.

Knows specs, needs and a machine, real or made up; imports no kernel and reads nothing of the world. What a refusal
says, what `tokenspeed explain` prints and what the plan records are the verdicts made here.

A kernel is eligible when the machine suffices, a dtype signature matches, every required feature and trait value is
declared, and no shape fact is outside what it declares. Among the eligible the choice goes by the user's pin, then
priority, then name. A pin only narrows the choice; nothing outranks a required feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tokenspeed.errors import Problem
from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.kernels.refusals import link_problem, missing_kernels, pin_problems, unavailable_plugins, unknown_pins
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.spec import WEIGHT_FORMAT, KernelSpec, Need, Priority, TraitValue, Verdict, spell_values
from tokenspeed.machine import Machine


@dataclass(frozen=True)
class Pins:
    """What the user insists on: a kernel by operator (`--kernel OP=NAME`), a solution by operator (`--moe-backend`)."""

    kernels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    solutions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Selection:
    """The outcome. `choices` lacks the needs that nothing can serve; `problems` then says why.

    `verdicts` has one verdict for each installed kernel of the need's operator. `links` are the trait values that all
    linked choices share (`kv_layout`). `unused_pins` are pinned operators that no need mentions.
    """

    choices: Mapping[Need, KernelSpec]
    verdicts: Mapping[Need, tuple[Verdict, ...]]
    links: Mapping[str, TraitValue]
    problems: tuple[Problem, ...]
    unused_pins: tuple[str, ...] = ()


@dataclass
class _Candidate:
    """One kernel considered for one need; eligible while it has no faults."""

    spec: KernelSpec
    faults: list[str]


def select(needs: Iterable[Need], registry: KernelRegistry, machine: Machine, pins: Pins | None = None) -> Selection:
    """Choose a kernel for every need, or say for every candidate why it will not do."""
    pins = pins or Pins()
    table = {
        need: [
            _Candidate(spec, list(_faults(spec, need, machine, pins))) for spec in registry.for_operator(need.operator)
        ]
        for need in needs
    }
    unserved = [need for need, candidates in table.items() if not _eligible(candidates)]
    links, unlinked = _settle_links({need: table[need] for need in table if need not in unserved})
    choices = {need: specs[0] for need, candidates in table.items() if (specs := _eligible(candidates))}
    verdicts = {need: tuple(_verdicts(table[need], choices.get(need), pins)) for need in table}
    pinned = [need for need in unserved if need.operator in pins.kernels]
    missing = [need for need in unserved if need.operator not in pins.kernels]
    return Selection(
        MappingProxyType(choices),
        MappingProxyType(verdicts),
        MappingProxyType(links),
        (
            *unknown_pins(pins.kernels),
            *pin_problems(pinned, verdicts, registry, pins.kernels),
            *missing_kernels(missing, verdicts, registry, machine),
            *(link_problem(link, group, verdicts) for link, group in unlinked.items()),
            *unavailable_plugins(unserved, registry, machine),
        ),
        tuple(sorted((pins.kernels.keys() & OPERATORS.keys()) - {need.operator for need in table})),
    )


def _eligible(candidates: Iterable[_Candidate]) -> list[KernelSpec]:
    """Specs without faults; the registry's order (priority, name) is the order of preference."""
    return [candidate.spec for candidate in candidates if not candidate.faults]


def _faults(spec: KernelSpec, need: Need, machine: Machine, pins: Pins) -> Iterator[str]:
    """Every reason why `spec` may not serve `need`."""
    if unmet := spec.machine.unmet(machine):
        yield unmet
    if not any(_matches(signature, need) for signature in spec.signatures):
        offered = " or ".join(sorted(_spell(signature.items()) for signature in spec.signatures))
        yield f"no dtype signature for {_spell(need.dtypes)}; it has {offered or 'none'}"
    for feature in sorted(need.features - spec.features):
        declared = ", ".join(sorted(spec.features)) or "no features"
        yield f"lacks the required feature {feature} (declares {declared})"
    if spec.stored and WEIGHT_FORMAT not in dict(need.traits):
        yield f"reads weights stored as {spell_values(spec.traits[WEIGHT_FORMAT])}, and these are plain"
    for name, value in need.traits:
        if name not in spec.traits:
            yield f"does not declare {name}, and {name}={value} is required"
        elif value not in spec.traits[name]:
            yield f"declares {name}={spell_values(spec.traits[name])}, and {value} is required"
    for name, value in need.facts:
        if name in spec.traits and value not in spec.traits[name]:
            yield f"{name} is {value}, and it supports only {spell_values(spec.traits[name])}"
    solution = pins.solutions.get(need.operator)
    if solution is not None and spec.solution != solution:
        yield f"solution {spec.solution}, and {solution} was asked for"
    pinned = pins.kernels.get(need.operator)
    if pinned is not None and spec.name != pinned:
        yield f"the user pinned {pinned}"


def _matches(signature: Mapping[str, str], need: Need) -> bool:
    return all(signature.get(role) == dtype for role, dtype in need.dtypes)


def _settle_links(
    table: Mapping[Need, list[_Candidate]],
) -> tuple[dict[str, TraitValue], dict[str, tuple[Need, ...]]]:
    """Give every link one value for the whole plan, and reject the kernels that do not have it.

    Takes the value whose best kernels have the greatest sum of priorities, then the first by name. Returns the values,
    and for each link that has no common value the needs that cannot agree.
    """
    values: dict[str, TraitValue] = {}
    unlinked: dict[str, tuple[Need, ...]] = {}
    links = {need: OPERATORS[need.operator].links if need.operator in OPERATORS else () for need in table}
    for link in sorted({link for names in links.values() for link in names}):
        group = {need: table[need] for need in table if link in links[need]}
        common = set.intersection(
            *({v for spec in _eligible(c) for v in spec.traits.get(link, ())} for c in group.values())
        )
        if common:
            values[link] = min(common, key=lambda value: (-_merit(link, value, group), str(value)))
        else:
            unlinked[link] = tuple(group)
        for candidates in group.values():
            for candidate in candidates:
                if not candidate.faults and (fault := _link_fault(candidate.spec, link, values.get(link))):
                    candidate.faults.append(fault)
    return values, unlinked


def _merit(link: str, value: TraitValue, group: Mapping[Need, list[_Candidate]]) -> int:
    """Sum over the needs of the best priority among the eligible kernels that have `value`."""
    return sum(
        max(spec.priority for spec in _eligible(candidates) if value in spec.traits.get(link, ()))
        for candidates in group.values()
    )


def _link_fault(spec: KernelSpec, link: str, value: TraitValue | None) -> str | None:
    if link not in spec.traits:
        return f"does not declare {link}, which must be the same for the whole plan"
    if value is None:
        return f"declares {link}={spell_values(spec.traits[link])}, which not every linked operator has"
    if value not in spec.traits[link]:
        return f"declares {link}={spell_values(spec.traits[link])}, and this plan uses {value}"
    return None


def _verdicts(candidates: list[_Candidate], winner: KernelSpec | None, pins: Pins) -> Iterator[Verdict]:
    alone = len(_eligible(candidates)) == 1
    for candidate in candidates:
        spec = candidate.spec
        if candidate.faults or winner is None:
            yield Verdict(spec, False, "; ".join(candidate.faults))
        elif spec is not winner:
            yield Verdict(spec, True, _outranked(spec, winner))
        elif pins.kernels.get(spec.operator) == spec.name:
            yield Verdict(spec, True, "chosen: pinned by the user")
        else:
            why = "the only eligible kernel" if alone else "first by priority and name"
            yield Verdict(spec, True, f"chosen: {why}, priority {spell_priority(spec.priority)}")


def _outranked(spec: KernelSpec, winner: KernelSpec) -> str:
    if spec.priority == winner.priority:
        return f"eligible, but {winner.name} has the same priority and comes first by name"
    mine, other = spell_priority(spec.priority), spell_priority(winner.priority)
    return f"eligible, but its priority {mine} is below {other} of {winner.name}"


def spell_priority(priority: int) -> str:
    """`PERFORMANT+1` for 9; a plain number outside the bands."""
    bands = [band for band in Priority if band <= priority]
    if not bands:
        return str(int(priority))
    offset = int(priority) - bands[-1]
    return bands[-1].name + (f"+{offset}" if offset else "")


def _spell(dtypes: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{role} {dtype}" for role, dtype in sorted(dtypes)) or "no dtypes"
