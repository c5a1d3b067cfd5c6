"""The kernels of this distribution as data. Imports no torch and no native code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from tokenspeed.kernels.spec import BATCH_INVARIANT, KernelSpec, MachineRequirement, Priority, TraitValue, trait_table

_CPU = MachineRequirement(device="cpu", arch=frozenset({"x86_64"}))
_FLOATS = ("bfloat16", "float32")


def _each(*roles: str, **fixed: str) -> tuple[Mapping[str, str], ...]:
    """Signatures in which all `roles` have one dtype, for bf16 and for fp32, beside fixed dtypes of other roles."""
    return tuple({**dict.fromkeys(roles, dtype), **fixed} for dtype in _FLOATS)


def _spec(
    operator: str,
    implementation: str,
    signatures: Iterable[Mapping[str, str]],
    *,
    prepare: str | None = None,
    traits: Mapping[str, Iterable[TraitValue]] | None = None,
) -> KernelSpec:
    module = "tokenspeed_kernels_aok.cpu"
    return KernelSpec(
        name=f"aok.{operator}",
        operator=operator,
        solution="aok",
        implementation=f"{module}.{implementation}",
        signatures=tuple(signatures),
        prepare_weights=f"{module}.{prepare}" if prepare else None,
        machine=_CPU,
        features=frozenset({BATCH_INVARIANT}),
        traits=trait_table(traits or {}),
        priority=Priority.PERFORMANT,
        bit_order=f"aok/{operator}@1",
        variant=f"{module}.library:variant",
    )


_MATRIX = tuple({"x": x, "weight": weight} for x, weight in itertools.product(_FLOATS, _FLOATS))

_KV_LAYOUT: Mapping[str, Iterable[TraitValue]] = {"kv_layout": {"aok_pairs"}}

SPECS: tuple[KernelSpec, ...] = (
    _spec(
        "embedding.lookup",
        "embedding:embedding",
        _each("weight"),
        traits={"reads_packing_of": {"aok.gemm.linear"}},
    ),
    _spec("gemm.linear", "gemm:linear", _MATRIX, prepare="gemm:prepare_linear"),
    _spec("gemm.batched", "gemm:batched", _MATRIX, prepare="gemm:prepare_batched"),
    _spec("norm.rms", "rows:rms_norm", _each("x", "weight")),
    _spec("norm.add_rms", "rows:add_rms_norm", _each("x", "weight")),
    _spec("rope.apply", "rows:rope", _each("x")),
    _spec("activation.silu_and_mul", "rows:silu_and_mul", _each("x")),
    _spec("cache.write", "attention:cache_write", _each("x", "kv"), traits=_KV_LAYOUT),
    _spec("attention.paged", "attention:attention", _each("x", "kv"), traits=_KV_LAYOUT),
    _spec("cache.write_latent", "mla:write_latent", _each("x", "kv")),
    _spec("attention.mla_paged", "mla:mla", _each("x", "kv")),
    _spec("norm.layer", "rows:layer_norm", _each("x", "weight")),
    _spec("attention.index_scores", "sparse:index_scores", _each("x", "kv")),
    _spec("attention.index_topk", "sparse:index_topk", ({},)),
    _spec(
        "attention.sparse_paged",
        "sparse:attention",
        _each("x", "kv"),
        traits={"slot_order": {"selection", "sorted"}},
    ),
    _spec("moe.route", "moe:route", _each("logits"), traits={"form": {"fused", "torch"}}),
    _spec(
        "moe.experts",
        "moe:experts",
        _MATRIX,
        prepare="gemm:prepare_batched",
        traits={"combine_order": {"slot"}},
    ),
    _spec(
        "sampling.block_sumexp",
        "sampling:block_sumexp",
        _each("logits"),
        traits={"block_order": {"aok_tree"}},
    ),
    _spec("sampling.logprobs", "sampling:logprobs", _each("logits"), traits={"block_order": {"aok_tree"}}),
    _spec("sampling.sample", "sampling:sample", _each("logits"), traits={"stream": {"per-request"}}),
)
