"""The installed kernels, filed by operator. Holds specs only; imports no implementation and decides nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from tokenspeed.errors import PluginError
from tokenspeed.kernels.operators import OPERATORS, Operator
from tokenspeed.kernels.spec import DTYPES, FEATURES, WEIGHT_FORMAT, KernelSpec, MachineRequirement, StoredPart
from tokenspeed.machine import ARCHITECTURES, DEVICES, INSTRUCTION_SETS, LIBRARIES
from tokenspeed.testing.names import waiver_faults

if TYPE_CHECKING:
    from tokenspeed.plugins import PluginHost, PluginReport

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_GPU_ARCHITECTURE = re.compile(r"sm\d{2,3}")


class KernelRegistry:
    """Specs by operator, best priority first, then by name: the order of loading leaves no trace.

    `unavailable` are the reports of plugins that could not be used (broken or switched off); a refusal names them,
    because one of them might have served. Raises PluginError when two specs share a name.
    """

    def __init__(self, specs: Iterable[KernelSpec] = (), unavailable: Iterable[PluginReport] = ()) -> None:
        self.unavailable = tuple(unavailable)
        self._by_name: dict[str, KernelSpec] = {}
        for spec in specs:
            other = self._by_name.setdefault(spec.name, spec)
            if other is not spec:
                raise PluginError(
                    f"kernel {spec.name} is claimed by {other.distribution or 'one spec'} "
                    f"and by {spec.distribution or 'another'}"
                )
        self._by_operator: dict[str, list[KernelSpec]] = {}
        for spec in sorted(self._by_name.values(), key=lambda spec: (-spec.priority, spec.name)):
            self._by_operator.setdefault(spec.operator, []).append(spec)

    @classmethod
    def from_plugins(cls, host: PluginHost) -> KernelRegistry:
        """The kernels of every plugin that loaded."""
        return cls(host.kernels(), (report for report in host.reports if report.status != "ok"))

    def for_operator(self, name: str) -> tuple[KernelSpec, ...]:
        """The kernels of operator `name`, best priority first; empty when there are none."""
        return tuple(self._by_operator.get(name, ()))

    def find(self, name: str) -> KernelSpec | None:
        """The kernel called `name`, if it is installed."""
        return self._by_name.get(name)

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that have at least one kernel, sorted."""
        return tuple(sorted(self._by_operator))

    @property
    def distributions(self) -> frozenset[str]:
        """Distributions that gave at least one kernel."""
        return frozenset(spec.distribution for spec in self._by_name.values())

    def __iter__(self) -> Iterator[KernelSpec]:
        for operator in self.operators:
            yield from self._by_operator[operator]

    def __len__(self) -> int:
        return len(self._by_name)


def dtype_roles(operator: Operator) -> frozenset[str]:
    """The roles whose dtype is free: those written `$role` in the operator's arguments."""
    return frozenset(
        argument.dtype[1:] for argument in (*operator.arguments, *operator.returns) if argument.dtype.startswith("$")
    )


def spec_faults(spec: object) -> list[str]:
    """What is wrong with a spec as a plugin returned it; empty when it can be filed.

    Types are checked too, since a plugin's author may run no type checker: `features="batch_invariant"` would
    otherwise require the letters of that word.
    """
    if not isinstance(spec, KernelSpec):
        return [f"{spec!r} is not a KernelSpec"]
    if type(spec) is not KernelSpec:
        # A subclass could answer one thing to the selection and another to the certificate.
        return [
            f"kernel {spec.name} is a {type(spec).__name__}; a spec is plain data, a KernelSpec and no subclass of it"
        ]
    if not (isinstance(spec.name, str) and spec.name):
        return ["a kernel has no name"]
    faults = [*_operator_faults(spec), *_target_faults(spec), *_machine_faults(spec.machine), *_table_faults(spec)]
    if not isinstance(spec.priority, int):
        faults.append(f"priority is {spec.priority!r}, not an integer")
    return [f"kernel {spec.name}: {fault}" for fault in faults]


def _operator_faults(spec: KernelSpec) -> Iterator[str]:
    operator = OPERATORS.get(spec.operator)
    if operator is None:
        near = difflib.get_close_matches(str(spec.operator), OPERATORS, n=1)
        yield f"unknown operator {spec.operator!r}" + (f"; did you mean {near[0]}?" if near else "")
        return
    roles = dtype_roles(operator)
    if not isinstance(spec.signatures, tuple) or not spec.signatures:
        yield "no dtype signatures; give a tuple with at least one mapping from role to dtype"
        return
    for signature in spec.signatures:
        if not isinstance(signature, Mapping):
            yield f"signature {signature!r} is not a mapping from role to dtype"
        elif unknown := signature.keys() - roles:
            known = ", ".join(sorted(roles)) or "none"
            yield f"signature names {', '.join(sorted(unknown))}; {spec.operator} has the dtype roles {known}"
        else:
            yield from (fault for dtype in signature.values() for fault in _unknown("dtype", dtype, DTYPES))


def _machine_faults(machine: object) -> Iterator[str]:
    if not isinstance(machine, MachineRequirement):
        yield f"machine is {machine!r}, not a MachineRequirement"
        return
    yield from _unknown("device", machine.device, DEVICES)
    tables = ("arch", "arch", ARCHITECTURES), ("isa", "isa", INSTRUCTION_SETS), ("libraries", "library", LIBRARIES)
    for field, noun, known in tables:
        words = getattr(machine, field)
        if not isinstance(words, frozenset):
            yield f"{field} is {words!r}, not a frozenset of names"
        elif field == "arch" and machine.device == "cuda":
            yield from (
                f"unknown arch {word!r}; a GPU's is written as sm90"
                for word in sorted(map(str, words))
                if not _GPU_ARCHITECTURE.fullmatch(word)
            )
        else:
            yield from (fault for word in sorted(map(str, words)) for fault in _unknown(noun, word, known))


def _target_faults(spec: KernelSpec) -> Iterator[str]:
    targets = [("implementation", spec.implementation)]
    if spec.prepare_weights is not None:
        targets.append(("prepare_weights", spec.prepare_weights))
    if spec.variant is not None:
        targets.append(("variant", spec.variant))
    if spec.row_counts is not None:
        targets.append(("row_counts", spec.row_counts))
    if spec.quantise is not None:
        targets.append(("quantise", spec.quantise))
    for field, target in targets:
        if not (isinstance(target, str) and _TARGET.fullmatch(target)):
            yield f"{field} is {target!r}, not 'module:function'"


def _table_faults(spec: KernelSpec) -> Iterator[str]:
    if not isinstance(spec.waivers, Mapping):
        yield f"waivers is {spec.waivers!r}, not a mapping from check to reason"
    elif isinstance(spec.features, frozenset):
        yield from waiver_faults(spec)
    if not isinstance(spec.stored, tuple) or not all(isinstance(part, StoredPart) for part in spec.stored):
        yield f"stored is {spec.stored!r}, not a tuple of StoredPart"
    elif unknown := [part for part in spec.stored if part.dtype not in DTYPES]:
        yield from _unknown("dtype", unknown[0].dtype, DTYPES)
    elif spec.stored and (None in (spec.prepare_weights, spec.quantise) or WEIGHT_FORMAT not in spec.traits):
        yield f"stored needs the trait {WEIGHT_FORMAT}, prepare_weights to read the tensors and quantise to make them"
    if not isinstance(spec.features, frozenset) or not all(isinstance(name, str) for name in spec.features):
        yield f"features is {spec.features!r}, not a frozenset of names"
    else:
        yield from _misspelt("feature", spec.features, FEATURES)
    if not isinstance(spec.traits, Mapping) or not all(isinstance(v, frozenset) for v in spec.traits.values()):
        yield f"traits is {spec.traits!r}; build it with trait_table()"
    elif (operator := OPERATORS.get(spec.operator)) is not None:
        yield from _misspelt("trait", spec.traits, {*operator.facts, *operator.links})


def _unknown(kind: str, word: object, known: Collection[str]) -> Iterator[str]:
    """A word that nothing else in this release uses, so that the kernel could never be chosen."""
    if word not in known:
        near = len(known) > 4 and difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
        yield f"unknown {kind} {word!r}; {hint}"


def _misspelt(kind: str, names: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Names that are almost known ones: others are the author's own, but these would say nothing unnoticed."""
    for name in sorted(map(str, names)):
        near = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            yield f"unknown {kind} {name!r}; did you mean {near[0]}?"
