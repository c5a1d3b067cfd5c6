"""The plan: which kernel serves which operator under which numerics, and why. Frozen before anything heavy is loaded.

The plan is printed as a card and served at `GET /numerics`. `Plan.bind` is the only place that imports a kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenspeed.errors import Problem, StartRefused
from tokenspeed.kernels.select import Selection
from tokenspeed.kernels.spec import KernelSpec, Need, TraitValue, Verdict
from tokenspeed.machine import Machine
from tokenspeed.models.profile import ModelProfile
from tokenspeed.numerics.canonical import canonical_json, digest_of
from tokenspeed.numerics.resolve import ResolvedNumerics

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tokenspeed.layers.context import Operation


@dataclass(frozen=True)
class Plan:
    """What one engine will compute with.

    `model` is the name the user gave and `profile` what its package states. `choices` maps every need to its kernel and
    `verdicts` to the verdicts on all candidates. `links` are trait values that the whole plan shares (`kv_layout`).
    `versions` maps each distribution and library that takes part to its version.
    """

    model: str
    dtype: str
    profile: ModelProfile
    machine: Machine
    numerics: ResolvedNumerics
    choices: Mapping[Need, KernelSpec]
    verdicts: Mapping[Need, tuple[Verdict, ...]]
    links: Mapping[str, TraitValue]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = field(default=())

    def kernel(self, operation: Operation) -> KernelSpec:
        """The kernel chosen for a call site."""
        return self.choices[operation.need]

    def kernels(self) -> tuple[KernelSpec, ...]:
        """The distinct chosen kernels, by name."""
        return tuple(sorted({s.name: s for s in self.choices.values()}.values(), key=lambda spec: spec.name))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON of `decisions()`: equal digests, equal plans."""
        return digest_of(self.decisions())

    def decisions(self) -> dict[str, Any]:
        """What the plan decides, without names of people's machines or files: the part that the digest covers."""
        return {
            "architecture": self.profile.architecture,
            "model_distribution": f"{self.profile.distribution} {self.profile.version}",
            "dtype": self.dtype,
            "device": self.machine.device,
            "envelope": self.numerics.envelope,
            "trainer": self.numerics.trainer,
            "switches": dict(self.numerics.switches),
            "links": dict(self.links),
            "operators": sorted(
                (
                    {
                        "need": _need_dict(need),
                        "kernel": spec.name,
                        "distribution": f"{spec.distribution} {spec.version}",
                    }
                    for need, spec in self.choices.items()
                ),
                key=canonical_json,
            ),
        }

    def as_dict(self) -> dict[str, Any]:
        """The whole plan as plain data: decisions, reasons, verdicts, machine, versions and digest."""
        return {
            "digest": self.digest,
            "model": self.model,
            "dtype": self.dtype,
            "profile": {
                "architecture": self.profile.architecture,
                "distribution": self.profile.distribution,
                "version": self.profile.version,
                "numerics_envelopes": sorted(self.profile.numerics_envelopes),
            },
            "numerics": self.numerics.as_dict(),
            "machine": machine_dict(self.machine),
            "links": dict(sorted(self.links.items())),
            "operators": operators_dict(self.choices, self.verdicts),
            "versions": dict(sorted(self.versions.items())),
            "notes": list(self.notes),
        }

    def bind(self, operations: Iterable[Operation]) -> None:
        """Import the chosen kernels and attach them to the call sites.

        Raises StartRefused, with every kernel that cannot be imported or names a function that is not there.
        """
        problems: dict[str, Problem] = {}
        loaded: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {}
        for operation in operations:
            spec = self.kernel(operation)
            if spec.name not in loaded and spec.name not in problems:
                try:
                    prepare = spec.prepare_weights and import_target(spec.prepare_weights)
                    loaded[spec.name] = (import_target(spec.implementation), prepare or None)
                except (Exception, SystemExit) as error:  # a kernel's module may raise anything at import
                    problems[spec.name] = _broken_kernel(spec, error)
            if spec.name in loaded:
                operation.bind(*loaded[spec.name], spec)
        if problems:
            raise StartRefused(list(problems.values()))

    def variants(self) -> dict[str, str]:
        """The code variant (an instruction set, as a rule) that each kernel with variants uses here, by kernel name.

        Call it after `bind`: it asks the kernels' own modules. Raises StartRefused when one cannot answer.
        """
        found: dict[str, str] = {}
        problems = []
        for spec in self.kernels():
            if spec.variant is not None:
                try:
                    found[spec.name] = str(import_target(spec.variant)())
                except (Exception, SystemExit) as error:
                    problems.append(_broken_kernel(spec, error))
        if problems:
            raise StartRefused(problems)
        return found

    def row_counts(self, most: int) -> tuple[int, ...]:
        """Numbers of rows, up to `most`, whose calls compile all that the chosen kernels compile; ascending.

        Call it after `bind`, on the machine itself. Raises StartRefused when a kernel cannot answer.
        """
        found: set[int] = set()
        problems: dict[str, Problem] = {}
        for need, spec in self.choices.items():
            if spec.row_counts is not None:
                try:
                    found |= {int(count) for count in import_target(spec.row_counts)(need, most)}
                except (Exception, SystemExit) as error:
                    problems[spec.name] = _broken_kernel(spec, error)
        if problems:
            raise StartRefused(list(problems.values()))
        return tuple(sorted(count for count in found if 0 < count <= most))

    def card(self) -> RenderableType:
        """The plan as a card for the terminal."""
        from tokenspeed.numerics.card import plan_card

        return plan_card(self)


def make_plan(
    *,
    model: str,
    dtype: str,
    profile: ModelProfile,
    machine: Machine,
    numerics: ResolvedNumerics,
    selection: Selection,
    core_version: str,
    notes: Iterable[str] = (),
) -> Plan:
    """Freeze the outcome of resolution and selection. The caller has made sure that there are no problems."""
    versions = {"tokenspeed": core_version, **machine.libraries}
    owners: list[KernelSpec | ModelProfile] = [*selection.choices.values(), profile]
    versions |= {owner.distribution: owner.version for owner in owners if owner.distribution}
    unused = [f"--kernel {operator}=… is unused: the model does not need it" for operator in selection.unused_pins]
    return Plan(
        model,
        dtype,
        profile,
        machine,
        numerics,
        selection.choices,
        selection.verdicts,
        selection.links,
        MappingProxyType(versions),
        (*unused, *notes),
    )


def machine_dict(machine: Machine) -> dict[str, Any]:
    """A machine as plain data."""
    return {
        "device": machine.device,
        "arch": machine.arch,
        "isa": sorted(machine.isa),
        "name": machine.name,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "libraries": dict(sorted(machine.libraries.items())),
    }


def operators_dict(
    choices: Mapping[Need, KernelSpec], verdicts: Mapping[Need, tuple[Verdict, ...]]
) -> list[dict[str, Any]]:
    """Every need with its kernel (None where nothing can serve) and the verdict on every candidate."""
    return [
        {
            **_need_dict(need),
            "kernel": choices[need].name if need in choices else None,
            "bit_order": choices[need].bit_order if need in choices else None,
            "candidates": [
                {
                    "kernel": verdict.spec.name,
                    "distribution": verdict.spec.distribution,
                    "version": verdict.spec.version,
                    "accepted": verdict.accepted,
                    "reason": verdict.reason,
                }
                for verdict in found
            ],
        }
        for need, found in verdicts.items()
    ]


def _need_dict(need: Need) -> dict[str, Any]:
    return {
        "operator": need.operator,
        "dtypes": dict(need.dtypes),
        "facts": dict(need.facts),
        "features": sorted(need.features),
        "traits": dict(need.traits),
    }


def import_target(target: str) -> Callable[..., Any]:
    """The function that `"module:function"` names; TypeError when it is none, and whatever its module raises."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is {function!r}, not a function")
    return function  # type: ignore[no-any-return]


def _broken_kernel(spec: KernelSpec, error: BaseException) -> Problem:
    return Problem(
        "broken-kernel",
        f"kernel {spec.name} of {spec.distribution} {spec.version} was chosen for {spec.operator} and cannot be loaded",
        (f"{spec.implementation}: {type(error).__name__}: {error}",),
        f"repair {spec.distribution}, or pin another kernel with --kernel {spec.operator}=NAME",
    )
