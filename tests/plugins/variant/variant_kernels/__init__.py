"""The plugin: every kernel declares `batch_invariant`, and only the two honest ones should."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed import BATCH_INVARIANT, KernelSpec, Priority, hookimpl, trait_table

_ROLES = {
    "gemm.linear": ("x", "weight"),
    "norm.rms": ("x", "weight"),
    "rope.apply": ("x",),
    "activation.silu_and_mul": ("x",),
    "cache.write": ("x", "kv"),
    "attention.paged": ("x", "kv"),
    "sampling.sample": ("logits",),
    "sampling.logprobs": ("logits",),
}
_TRAITS = {
    "cache.write": {"kv_layout": {"nhd"}},
    "attention.paged": {"kv_layout": {"nhd"}},
    "sampling.sample": {"stream": {"per-request"}},
    "sampling.logprobs": {"block_order": {"aok_tree"}},
}
_PREPARE = {"gemm.linear": "variant_kernels.gemm:prepare"}

KERNELS = {
    "variant.gemm.split_k": ("gemm.linear", "gemm:split_k"),
    "variant.gemm.tile_by_batch": ("gemm.linear", "gemm:tile_by_batch"),
    "variant.gemm.remainder_row": ("gemm.linear", "gemm:remainder_row"),
    "variant.gemm.threads": ("gemm.linear", "gemm:threads"),
    "variant.gemm.uninitialised": ("gemm.linear", "gemm:uninitialised"),
    "variant.gemm.first_call": ("gemm.linear", "gemm:first_call"),
    "variant.norm.large_batch": ("norm.rms", "rows:large_batch_norm"),
    "variant.activation.batch_scale": ("activation.silu_and_mul", "rows:batch_scale_silu"),
    "variant.rope.batch_offset": ("rope.apply", "rows:batch_offset_rope"),
    "variant.cache.honest": ("cache.write", "attention:honest_write"),
    "variant.cache.stale": ("cache.write", "attention:stale_write"),
    "variant.attention.honest": ("attention.paged", "attention:honest"),
    "variant.attention.batch_max": ("attention.paged", "attention:batch_max"),
    "variant.attention.chunk_boundary": ("attention.paged", "attention:chunk_boundary"),
    "variant.attention.split_by_batch": ("attention.paged", "attention:split_by_batch"),
    "variant.attention.page_order": ("attention.paged", "attention:page_order"),
    "variant.attention.padding": ("attention.paged", "attention:padding"),
    "variant.sampling.batch_stream": ("sampling.sample", "sampling:batch_stream"),
    "variant.sampling.stateful_stream": ("sampling.sample", "sampling:stateful_stream"),
    "variant.sampling.ties_to_the_highest": ("sampling.sample", "sampling:ties_to_the_highest"),
    "variant.logprobs.batch_max": ("sampling.logprobs", "sampling:batch_max_logprobs"),
}


def _spec(name: str, operator: str, target: str) -> KernelSpec:
    return KernelSpec(
        name,
        operator,
        "variant",
        f"variant_kernels.{target}",
        (dict.fromkeys(_ROLES[operator], "float32"),),
        prepare_weights=_PREPARE.get(operator),
        features=frozenset({BATCH_INVARIANT}),
        traits=trait_table(_TRAITS.get(operator, {})),
        priority=Priority.REFERENCE,
    )


@hookimpl
def tokenspeed_kernels() -> Iterable[KernelSpec]:
    return [_spec(name, operator, target) for name, (operator, target) in KERNELS.items()]
