"""A kernel as the kit runs it: its functions, its partner over the KV cache, and the reference of its operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenspeed.kernels.operators import OPERATORS, Operator
from tokenspeed.kernels.reference.plugin import tokenspeed_kernels as reference_kernels
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.machine import Machine
from tokenspeed.numerics.plan import import_target

LAYOUT = "kv_layout"


PARTNERS = {
    "attention.paged": "cache.write",
    "cache.write": "attention.paged",
    "attention.mla_paged": "cache.write_latent",
    "attention.index_scores": "cache.write_latent",
    "attention.sparse_paged": "cache.write_latent",
    "cache.write_latent": "attention.mla_paged",
}
"""Operators over the KV cache: who writes what whom reads. Neither can be judged without the other."""


class NoPartner(LookupError):
    """A kernel over the KV cache cannot be judged alone, and no other kernel shares its layout."""


@dataclass(frozen=True)
class Subject:
    """One kernel for one dtype signature. `partner` is the other half of the pair that shares a cache layout."""

    spec: KernelSpec
    dtypes: Mapping[str, str]
    run: Callable[..., Any]
    prepare: Callable[[Any], Any] | None
    partner: Subject | None = None
    quantise: Callable[[torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor]] | None = None

    @property
    def operator(self) -> Operator:
        """The description of its operator."""
        return OPERATORS[self.spec.operator]

    @property
    def is_paged(self) -> bool:
        """Whether it works on the KV cache."""
        return self.spec.operator in PARTNERS

    @property
    def writes_cache(self) -> bool:
        """Whether its result is what it leaves in the cache."""
        return self.spec.operator.startswith("cache.")

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device(self.spec.machine.device)

    def pack(self, weight: Any) -> Any:
        """What the kernel takes for a float weight: stored first where it has a format, packed where it packs."""
        if self.prepare is None:
            return weight
        return self.prepare(self.quantise(weight)[0] if self.quantise else weight.clone())

    def call(self, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Run on arguments by role, in the operator's order; results as a tuple."""
        out = self.run(*(arguments[argument.role] for argument in self.operator.arguments))
        if out is None:
            return ()
        return tuple(out) if isinstance(out, tuple | list) else (out,)


def load_subject(spec: KernelSpec, dtypes: Mapping[str, str], others: Iterable[KernelSpec] = ()) -> Subject:
    """Import a kernel, and a partner for it from `others` or the reference kernels where it needs one.

    Raises whatever the import raises, and NoPartner.
    """
    subject = _alone(spec, dtypes)
    if subject.is_paged:
        subject = replace(subject, partner=_partner(spec, dtypes, others))
    return subject


def _alone(spec: KernelSpec, dtypes: Mapping[str, str]) -> Subject:
    prepare = import_target(spec.prepare_weights) if spec.prepare_weights else None
    quantise = import_target(spec.quantise) if spec.quantise else None
    return Subject(spec, dtypes, import_target(spec.implementation), prepare, quantise=quantise)


def _partner(spec: KernelSpec, dtypes: Mapping[str, str], others: Iterable[KernelSpec]) -> Subject:
    wanted = PARTNERS[spec.operator]
    has_layout = LAYOUT in OPERATORS[spec.operator].links
    layouts = spec.traits.get(LAYOUT, frozenset())
    # The reference comes first: a pair that is wrong in the same way would agree with itself.
    for other in (*reference_kernels(), *others):
        if (
            other.operator == wanted
            and other.machine.device == spec.machine.device
            and (not has_layout or layouts & other.traits.get(LAYOUT, frozenset()))
            and any(dict(signature) == dict(dtypes) for signature in other.signatures)
        ):
            return _alone(other, dtypes)
    named = " or ".join(map(str, sorted(layouts, key=str)))
    raise NoPartner(f"no {wanted} kernel for these dtypes" + (f" with {LAYOUT} {named or 'declared'}" * has_layout))


def load_peers(
    spec: KernelSpec, dtypes: Mapping[str, str], others: Iterable[KernelSpec], machine: Machine
) -> list[Subject]:
    """Other kernels that publish the same order of additions and run here, for the same dtypes."""
    return [
        load_subject(other, dtypes, others)
        for other in others
        if spec.bit_order is not None
        and other.bit_order == spec.bit_order
        and other.name != spec.name
        and other.operator == spec.operator
        and not other.machine.unmet(machine)
        and any(dict(signature) == dict(dtypes) for signature in other.signatures)
    ]


def reference_subject(operator: str, dtypes: Mapping[str, str], device: str) -> Subject:
    """The reference of an operator, over the reference's own cache."""
    specs = {(spec.operator, spec.machine.device): spec for spec in reference_kernels()}
    subject = _alone(specs[operator, device], dtypes)
    if subject.is_paged:
        subject = replace(subject, partner=_alone(specs[PARTNERS[operator], device], dtypes))
    return subject


def not_here(spec: KernelSpec, machine: Machine) -> str | None:
    """Why this machine cannot run a kernel, or None."""
    return spec.machine.unmet(machine)
