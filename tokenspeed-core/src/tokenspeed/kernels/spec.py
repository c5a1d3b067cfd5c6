"""What a kernel's author states and what a caller requires, as plain data.

A *trait* is what the seller says about a kernel; a *feature* is what the buyer requires. A kernel is eligible only
when it declares every required feature, and every required trait value: "not declared" means "not promised".
This module imports nothing heavy; a spec names its implementation as a string.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

from tokenspeed.machine import Machine

BATCH_INVARIANT = "batch_invariant"
"""Feature: a row's bits are a function of that row (its KV, the weights) alone. See `docs/concepts/numerics.md`."""

CUDA_GRAPH = "cuda_graph"
"""Feature: a call waits for nothing and issues the same work for the same shapes, so a CUDA graph can record it."""

FEATURES = frozenset({BATCH_INVARIANT, CUDA_GRAPH})
"""Every feature that something may require."""

WEIGHT_FORMAT = "weight_format"
"""Trait: how a quantised checkpoint stores the weights a kernel reads: `quant_method`, or `quant_method:format`."""

STREAM = "stream"
"""Trait of `sampling.sample`: where its noise comes from."""

PER_REQUEST = "per-request"
"""Value of `stream`: the published function of seed, position and token id."""

TraitValue = str | int

DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "bool"),
        *("uint64", "uint32", "uint16", "uint8", "float4_e2m1fn_x2", "float8_e8m0fnu"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    }
)
"""Names of dtypes, which are torch's."""


class Priority(IntEnum):
    """Bands of preference; add a small offset (0 to 3) inside a band."""

    REFERENCE = 0
    PORTABLE = 4
    PERFORMANT = 8
    SPECIALIZED = 12
    PLUGIN = 16


@dataclass(frozen=True)
class MachineRequirement:
    """What a kernel needs of the computer.

    `arch` lists accepted architectures (`x86_64`, `aarch64`, `sm90`, …; empty accepts all of the device's), `isa` the
    instruction sets that must all be present, `libraries` the importable modules that must be installed. The words are
    those of `tokenspeed.machine`.
    """

    device: str = "cpu"
    arch: frozenset[str] = frozenset()
    isa: frozenset[str] = frozenset()
    libraries: frozenset[str] = frozenset()

    def unmet(self, machine: Machine) -> str | None:
        """Why `machine` does not do, or None when it does."""
        if machine.device != self.device:
            return f"needs device {self.device}, this machine is {machine.device}"
        if self.arch and machine.arch not in self.arch:
            return f"needs arch {' or '.join(sorted(self.arch))}, this machine is {machine.arch}"
        if missing := self.isa - machine.isa:
            return f"needs instruction sets {', '.join(sorted(missing))}, which this machine lacks"
        if missing := self.libraries - machine.libraries.keys():
            return f"needs {', '.join(sorted(missing))}, which is not installed"
        return None


def trait_table(traits: Mapping[str, Iterable[TraitValue]]) -> Mapping[str, frozenset[TraitValue]]:
    """A frozen copy of `traits` with every value set frozen."""
    return MappingProxyType({name: frozenset(values) for name, values in traits.items()})


SHORTEST_RANGE = 4
"""So many numbers at equal steps are spelt as a range."""


def spell_values(values: Iterable[TraitValue]) -> str:
    """The values of a trait for people: `fused|torch`, and numbers as `1-8, 16, 64-256 step 16`."""
    values = list(values)
    numbers = sorted(value for value in values if isinstance(value, int) and not isinstance(value, bool))
    if len(numbers) < len(values):
        return "|".join(sorted(map(str, values)))
    parts = []
    while numbers:
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        count = next((i for i, n in enumerate(numbers) if n != numbers[0] + i * step), len(numbers))
        if count < SHORTEST_RANGE:
            count = 1
            parts.append(str(numbers[0]))
        else:
            parts.append(f"{numbers[0]}-{numbers[count - 1]}" + (f" step {step}" if step > 1 else ""))
        numbers = numbers[count:]
    return ", ".join(parts)


@dataclass(frozen=True)
class StoredPart:
    """One tensor of a weight format: `suffix` as in `q_proj.weight_scale`, the dtype's name, and the shape.

    `shape` is written in the axes of the weight, `N,K`; an axis may be divided (`N,K/128`). The first axis is always N:
    projections that are stored apart in a checkpoint are put together along it.
    """

    suffix: str
    dtype: str
    shape: str = "N,K"


@dataclass(frozen=True)
class KernelSpec:
    """One implementation of one operator, described without importing it.

    `name` is unique among all installed distributions (`aok.gemm.linear`). `implementation` and `prepare_weights` are
    `"module:function"`. A `signature` maps the operator's dtype roles to dtype names (`{"x": "bfloat16", …}`); a kernel
    may list several. `bit_order` names the published order of additions that the kernel follows, with its version
    (`aok/gemm.linear@1`); kernels with equal bit orders give equal bits. `variant` is for kernels that choose code when
    they are loaded: the `"module:function"` that names the choice (an instruction set), asked after the implementation
    was imported. It is provenance, and part of what identifies the bits of a kernel without `bit_order`. `row_counts`
    is for kernels that compile code for a number of rows when it is first met: the `"module:function"` that is asked
    (need, most) on the machine itself, and returns numbers of rows, up to `most`, whose calls compile all that calls of
    up to `most` rows can meet.

    `stored` is for kernels of a weight format (trait `weight_format`): the tensors that a checkpoint holds in the place
    of one weight. `prepare_weights` then gets a mapping from suffix to tensor, and `quantise` is the
    `"module:function"` that makes them of a float weight: (mapping from suffix to tensor, the weight as it is read
    back); the conformance kit needs it. `waivers` maps a check of the kit that the kernel does not pass to the written
    reason, which `tokenspeed plugins` shows. `distribution` and `version` are filled by the host.
    """

    name: str
    operator: str
    solution: str
    implementation: str
    signatures: tuple[Mapping[str, str], ...]
    prepare_weights: str | None = None
    machine: MachineRequirement = field(default_factory=MachineRequirement)
    features: frozenset[str] = frozenset()
    traits: Mapping[str, frozenset[TraitValue]] = field(default_factory=lambda: trait_table({}))
    priority: int = Priority.PORTABLE
    bit_order: str | None = None
    variant: str | None = None
    row_counts: str | None = None
    stored: tuple[StoredPart, ...] = ()
    quantise: str | None = None
    waivers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    distribution: str = ""
    version: str = ""


@dataclass(frozen=True)
class Need:
    """What one place in a model (or in the engine) asks of an operator.

    `dtypes` gives a dtype name for each role; `facts` are shape facts that a kernel may restrict by a trait of the same
    name (`head_dim`), in which case the fact must be among the trait's values; `traits` are *required* trait values: a
    kernel that is silent about one is not eligible. All three are sorted tuples, so that needs hash and compare.
    """

    operator: str
    dtypes: tuple[tuple[str, str], ...] = ()
    facts: tuple[tuple[str, TraitValue], ...] = ()
    features: frozenset[str] = frozenset()
    traits: tuple[tuple[str, TraitValue], ...] = ()

    @classmethod
    def of(
        cls,
        operator: str,
        *,
        dtypes: Mapping[str, str],
        facts: Mapping[str, TraitValue] | None = None,
        features: Iterable[str] = (),
        traits: Mapping[str, TraitValue] | None = None,
    ) -> Need:
        """Build a need from mappings in any order."""
        return cls(
            operator,
            tuple(sorted(dtypes.items())),
            tuple(sorted((facts or {}).items())),
            frozenset(features),
            tuple(sorted((traits or {}).items())),
        )

    def without_facts(self) -> Need:
        """The same need for any shape."""
        return Need(self.operator, self.dtypes, (), self.features, self.traits)

    def describe(self) -> str:
        """One line for people: `gemm.linear (out bfloat16, weight bfloat16, x bfloat16; k=1024, n=3072)`."""
        dtypes = ", ".join(f"{role} {dtype}" for role, dtype in self.dtypes)
        facts = ", ".join(f"{name}={value}" for name, value in (*self.facts, *self.traits))
        inside = "; ".join(part for part in (dtypes, facts) if part)
        return f"{self.operator} ({inside})" if inside else self.operator


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel may serve a need, and why (not)."""

    spec: KernelSpec
    accepted: bool
    reason: str

    def describe(self) -> str:
        """One line: name, distribution, verdict and reason."""
        word = "accepted" if self.accepted else "rejected"
        return f"{self.spec.name} ({self.spec.distribution} {self.spec.version}): {word}, {self.reason}"
