"""The problems that selection reports: operator, dtypes, machine, every candidate, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tokenspeed.errors import Problem
from tokenspeed.kernels.known import may_serve, suppliers
from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.spec import Need, Verdict
from tokenspeed.machine import Machine

_SHAPES_SHOWN = 4

Verdicts = Mapping[Need, tuple[Verdict, ...]]


def missing_kernels(
    needs: Iterable[Need], verdicts: Verdicts, registry: KernelRegistry, machine: Machine
) -> Iterator[Problem]:
    """One problem for each operator and dtype that no kernel can serve, however many shapes need it."""
    for group in alike(needs, verdicts):
        need = group[0]
        candidates = [verdict.describe() for verdict in verdicts[need]]
        yield Problem(
            "missing-kernel",
            f"no kernel can serve {_requirement(need)} on {machine.describe()}",
            (
                *_shapes(group),
                *(candidates or [f"no usable plugin offers a kernel for {need.operator}"]),
            ),
            _remedy(need, registry, machine),
        )


def unknown_pins(pins: Mapping[str, str]) -> Iterator[Problem]:
    """Pins of operators that do not exist."""
    for operator in pins.keys() - OPERATORS.keys():
        near = difflib.get_close_matches(operator, OPERATORS, n=1)
        yield Problem(
            "pin",
            f"--kernel {operator}={pins[operator]}: there is no operator {operator}",
            remedy=f"did you mean {near[0]}?" if near else f"the operators are {', '.join(OPERATORS)}",
        )


def pin_problems(
    needs: Iterable[Need], verdicts: Verdicts, registry: KernelRegistry, pins: Mapping[str, str]
) -> Iterator[Problem]:
    """Pins that cannot be followed, naming the pinned kernel and what it lacks."""
    for group in alike(needs, verdicts):
        need = group[0]
        flag = f"--kernel {need.operator}={pins[need.operator]}"
        pinned = next((v for v in verdicts[need] if v.spec.name == pins[need.operator]), None)
        if pinned is not None:
            yield Problem(
                "pin",
                f"{flag} cannot serve {_requirement(need)}: it {pinned.reason}",
                tuple(_shapes(group)),
                "drop the pin, or pin a kernel that declares what is required (see tokenspeed explain)",
            )
            continue
        installed = [spec.name for spec in registry.for_operator(need.operator)]
        near = difflib.get_close_matches(pins[need.operator], installed, n=1)
        elsewhere = registry.find(pins[need.operator])
        yield Problem(
            "pin",
            f"{flag}: that kernel serves {elsewhere.operator}" if elsewhere else f"{flag}: no such kernel is installed",
            (f"installed for {need.operator}: {', '.join(installed) or 'none'}",),
            f"did you mean {near[0]}?" if near else "drop the pin, or install the plugin that offers the kernel",
        )


def link_problem(link: str, group: Sequence[Need], verdicts: Verdicts) -> Problem:
    """Operators that must agree on a trait, and cannot."""
    return Problem(
        "link",
        f"no value of {link} is served by every operator that must share it: "
        f"{', '.join(dict.fromkeys(need.operator for need in group))}",
        tuple(f"{need.operator}: {verdict.describe()}" for need in group for verdict in verdicts[need]),
        "install or pin kernels of one distribution for all of them",
    )


def unavailable_plugins(needs: Sequence[Need], registry: KernelRegistry, machine: Machine) -> Iterator[Problem]:
    """Plugins that could not be used and might have served these needs: never just "not found"."""
    for report in registry.unavailable:
        concerned = [need.operator for need in needs if may_serve(report.distribution, need, machine.device)]
        if concerned:
            yield Problem(
                f"{report.status}-plugin",
                report.describe(),
                (f"its kernels could not be considered for {', '.join(dict.fromkeys(concerned))}",),
                f"add {report.name} to --plugins" if report.status == "disabled" else f"repair {report.distribution}",
            )


def alike(needs: Iterable[Need], verdicts: Verdicts) -> list[list[Need]]:
    """Needs that differ only in shape and met the same verdicts, together."""
    groups: dict[object, list[Need]] = {}
    for need in needs:
        reasons = tuple((verdict.spec.name, verdict.reason) for verdict in verdicts[need])
        groups.setdefault((need.operator, need.dtypes, need.features, need.traits, reasons), []).append(need)
    return list(groups.values())


def _requirement(need: Need) -> str:
    parts = [*sorted(need.features), *(f"{name}={value}" for name, value in need.traits)]
    return Need(need.operator, need.dtypes).describe() + (f" with {', '.join(parts)}" if parts else "")


def _shapes(group: Sequence[Need]) -> Iterator[str]:
    shapes = [", ".join(f"{name}={value}" for name, value in need.facts) for need in group if need.facts]
    if shapes:
        more = f"; and {len(shapes) - _SHAPES_SHOWN} more" if len(shapes) > _SHAPES_SHOWN else ""
        yield f"needed for {'; '.join(shapes[:_SHAPES_SHOWN])}{more}"


def _remedy(need: Need, registry: KernelRegistry, machine: Machine) -> str:
    unusable = {report.distribution for report in registry.unavailable}
    missing = suppliers(need, machine.device, registry.distributions | unusable)
    steps = [f"install {known.name} ({known.install})" for known in missing]
    if any(may_serve(report.distribution, need, machine.device) for report in registry.unavailable):
        steps.append("mend the plugins named below")
    if not steps:
        steps.append("install a distribution that offers such a kernel")
        if need.features:
            steps.append("use --numerics auto, which promises nothing")
    return ", or ".join(steps)
