"""The certificate of an engine: what determines the bits of its replies, and where they were computed.

The two parts must not be mixed up. *Bits* holds what a reply is a function of: weights, model, switches and, for every
operator, the order of additions that its kernel publishes. Its short hash is the `fingerprint`: where the promises
`run` and `batch` are made, engines with equal fingerprints give equal bits, whatever their machine, instruction set,
threads, memory or load. *Provenance* records exactly those, the versions, and what the harness found; it is evidence
and enters no hash.

A kernel that publishes no bit order enters the bits by distribution, version and variant, and so does a model: that is
narrower than need be, never wider.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenspeed.errors import ConfigError
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.numerics.canonical import digest_of
from tokenspeed.numerics.switches import SWITCHES

if TYPE_CHECKING:
    from tokenspeed.numerics.plan import Plan
    from tokenspeed.numerics.weights import WeightsDigest

SCHEMA = "tokenspeed/certificate@1"

ENGINE_BIT_ORDER = "tokenspeed/engine@1"
"""Everything between the operators that core computes: penalties, masks, seeds, positions, residual sums, layers."""

_UNRELATED_CONFIG = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "attn_implementation",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a `config.json` that change nothing that is computed (the dtype in use is listed by itself)."""

_ALWAYS = ("logprob_order", "sampling_stream")
_ON_GPU = ("autotune", "collectives", "allreduce_fusion")
_BY_OPERATOR = {
    "attention.sparse_paged": ("dsa_slot_order",),
    "moe.experts": ("moe_combine_order",),
    "moe.route": ("router_topk",),
}


@dataclass(frozen=True)
class Certificate:
    """`bits` and `provenance` as plain data (strings, numbers, lists, mappings)."""

    bits: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON of `bits`."""
        return digest_of(dict(self.bits))

    @property
    def fingerprint(self) -> str:
        """The short form of the digest: `system_fingerprint` of every reply."""
        return f"tokenspeed-{self.digest[:16]}"

    def with_weights(self, weight_version: str, weights: WeightsDigest | None) -> Certificate:
        """The certificate after the weights were replaced.

        Without a digest of the new ones it names the version that the caller gave them and what they replaced: such a
        fingerprint is this engine's own and equals no other's.
        """
        if weights is not None:
            state: dict[str, Any] = {"sha256": weights.hex}
        else:
            state = {"version": weight_version, "replaces": self.bits["weights"]}
        return replace(self, bits=MappingProxyType({**self.bits, "weights": state}))

    def with_results(self, results: Mapping[str, Any]) -> Certificate:
        """The certificate with what a harness found, as provenance."""
        return replace(self, provenance=MappingProxyType({**self.provenance, "harness": dict(results)}))

    def with_kit(self, proof: Mapping[str, Any] | None) -> Certificate:
        """The certificate with what the conformance kit found at start, as provenance; None where it did not run."""
        return replace(self, provenance=MappingProxyType({**self.provenance, "kit": dict(proof) if proof else None}))

    def as_dict(self) -> dict[str, Any]:
        """The whole certificate as plain data."""
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "digest": self.digest,
            "bits": dict(self.bits),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, value: object) -> Certificate:
        """Read `as_dict()` back. Raises ConfigError when it is no certificate, or not the one that it claims to be."""
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise ConfigError(f"this is no certificate: its schema should be {SCHEMA}")
        if not isinstance(value.get("bits"), dict) or not isinstance(value.get("provenance"), dict):
            raise ConfigError("this certificate is not complete: it should hold `bits` and `provenance`")
        certificate = cls(MappingProxyType(value["bits"]), MappingProxyType(value["provenance"]))
        if certificate.digest != value.get("digest") or certificate.fingerprint != value.get("fingerprint"):
            raise ConfigError(
                f"this certificate was altered: it states {value.get('fingerprint')}, its bits give "
                f"{certificate.fingerprint}"
            )
        return certificate


def certify(
    plan: Plan,
    weights: WeightsDigest,
    *,
    model_config: Mapping[str, Any],
    eos_ids: tuple[int, ...],
    logprobs_mode: str,
    vocab_size: int,
    tables: Mapping[str, str],
    variants: Mapping[str, str],
    provenance: Mapping[str, Any],
) -> Certificate:
    """The certificate of one engine.

    `weights` are the tensors that the model reads, `model_config` the checkpoint's `config.json`, `eos_ids` what ends a
    request, `tables` the digests of the tables that the host's math library computed for the model (they differ between
    some machines), `variants` the code variant (instruction set) in use by kernel name, and `provenance` what is known
    of the place beside the plan.
    """
    profile = plan.profile
    model: dict[str, Any] = {
        "architecture": profile.architecture,
        "config": digest_of({key: value for key, value in model_config.items() if key not in _UNRELATED_CONFIG}),
        "dtype": plan.dtype,
        "forward": profile.bit_order or {"distribution": profile.distribution, "version": profile.version},
        "eos_token_ids": sorted(eos_ids),
        "tables": dict(tables),
    }
    bits = {
        "model": model,
        "weights": {"sha256": weights.hex},
        "engine": ENGINE_BIT_ORDER,
        "promises": [promise for promise in plan.numerics.promises if promise != "trainer"],
        "switches": {name: plan.numerics.switches[name] for name in sorted(_deciding(plan))},
        "logprobs": {"mode": logprobs_mode, "block": plan.numerics.logprob_block(vocab_size)},
        "operators": _operators(plan, variants),
    }
    kernels = [_kernel(spec, variants) for spec in plan.kernels()]
    return Certificate(
        MappingProxyType(bits), MappingProxyType({"plan": plan.digest, "kernels": kernels, **provenance})
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Every place where two mappings of plain data differ: `switches.logprob_order: torch, now megatron`."""
    for key in sorted({*old, *new}):
        here = f"{at}.{key}" if at else key
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, here)
        elif isinstance(before, list) and isinstance(after, list):
            yield from (f"{here}: no longer {item}" for item in before if item not in after)
            yield from (f"{here}: now also {item}" for item in after if item not in before)
        elif before != after:
            yield f"{here}: {before}, now {after}"


def file_digest(path: Path) -> str | None:
    """SHA-256 (hex) of a small file, None when there is none."""
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _deciding(plan: Plan) -> set[str]:
    """The switches that can change a bit of this model on this device; the others only chose kernels."""
    names = {*_ALWAYS, *plan.profile.needs_switches}
    if plan.machine.device == "cuda":
        names |= {*_ON_GPU, *(switch.name for switch in SWITCHES.values() if switch.gpu_only)}
    for need in plan.choices:
        names.update(_BY_OPERATOR.get(need.operator, ()))
    return names & plan.numerics.switches.keys()


def _operators(plan: Plan, variants: Mapping[str, str]) -> list[dict[str, Any]]:
    """Operator, dtypes, required traits and order of additions; shapes only where kernels differ by shape."""
    groups: dict[str, dict[str, Any]] = {}
    for need, spec in plan.choices.items():
        asked = {"operator": need.operator, "dtypes": dict(need.dtypes), "traits": dict(need.traits)}
        group = groups.setdefault(digest_of(asked), {"asked": asked, "orders": {}})
        order = _order(spec, variants)
        group["orders"].setdefault(digest_of(order), (order, []))[1].append(dict(need.facts))
    entries = []
    for group in groups.values():
        orders = list(group["orders"].values())
        for order, facts in orders:
            shapes = {} if len(orders) == 1 else {"shapes": sorted(facts, key=digest_of)}
            entries.append({**group["asked"], "order": order, **shapes})
    return sorted(entries, key=lambda entry: (entry["operator"], digest_of(entry)))


def _order(spec: KernelSpec, variants: Mapping[str, str]) -> str | dict[str, str]:
    if spec.bit_order:
        return spec.bit_order
    return {
        "kernel": spec.name,
        "distribution": spec.distribution,
        "version": spec.version,
        "variant": variants.get(spec.name, ""),
    }


def _kernel(spec: KernelSpec, variants: Mapping[str, str]) -> dict[str, str | None]:
    return {
        "kernel": spec.name,
        "distribution": spec.distribution,
        "version": spec.version,
        "variant": variants.get(spec.name),
        "bit_order": spec.bit_order,
    }
