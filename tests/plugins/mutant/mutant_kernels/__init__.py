"""Specs of kernels that break a claim, each in its own way. No entry point names this package."""

from __future__ import annotations

from collections.abc import Mapping

from tokenspeed import BATCH_INVARIANT, KernelSpec, trait_table

_ROLES = {
    "embedding.lookup": ("weight",),
    "gemm.linear": ("x", "weight"),
    "norm.rms": ("x", "weight"),
    "rope.apply": ("x",),
    "activation.silu_and_mul": ("x",),
    "cache.write": ("x", "kv"),
    "attention.paged": ("x", "kv"),
    "attention.sparse_paged": ("x", "kv"),
    "attention.index_topk": (),
    "moe.experts": ("x", "weight"),
    "sampling.block_sumexp": ("logits",),
    "sampling.logprobs": ("logits",),
    "sampling.sample": ("logits",),
}
_TRAITS: Mapping[str, Mapping[str, set[str | int]]] = {
    "cache.write": {"kv_layout": {"nhd"}},
    "attention.paged": {"kv_layout": {"nhd"}},
    "sampling.sample": {"stream": {"per-request"}},
    "attention.sparse_paged": {"slot_order": {"sorted"}},
    "moe.experts": {"combine_order": {"slot"}},
}
_PREPARE = {
    "gemm:packed_by_first_batch": "gemm:first_batch_weight",
    "gemm:plan_of_first_shape": "gemm:planned_weight",
}

HONEST = {
    "honest.norm": ("norm.rms", "rows:honest_norm"),
    "honest.gemm": ("gemm.linear", "gemm:honest"),
    "honest.experts": ("moe.experts", "experts:honest"),
}

MUTANTS = {
    "gemm.no_such_function": ("gemm.linear", "gemm:missing"),
    "gemm.half_sums": ("gemm.linear", "gemm:half_sums"),
    "gemm.short_mantissa": ("gemm.linear", "gemm:short_mantissa"),
    "gemm.packed_by_first_batch": ("gemm.linear", "gemm:packed_by_first_batch"),
    "gemm.plan_of_first_shape": ("gemm.linear", "gemm:plan_of_first_shape"),
    "gemm.static_output": ("gemm.linear", "gemm:static_output"),
    "gemm.forgets_bias": ("gemm.linear", "gemm:forgets_bias"),
    "gemm.any_dtype": ("gemm.linear", "gemm:any_dtype"),
    "gemm.any_width": ("gemm.linear", "gemm:any_width"),
    "norm.aligned_path": ("norm.rms", "rows:aligned_path"),
    "norm.nan_payload": ("norm.rms", "rows:nan_payload"),
    "norm.assumes_contiguous": ("norm.rms", "rows:assumes_contiguous"),
    "norm.crashes_on_nothing": ("norm.rms", "rows:crashes_on_nothing"),
    "norm.half_range": ("norm.rms", "rows:half_range"),
    "norm.thread_split": ("norm.rms", "rows:thread_split"),
    "norm.declares_too_much": ("norm.rms", "rows:narrow"),
    "silu.in_place": ("activation.silu_and_mul", "rows:in_place"),
    "silu.returns_a_view": ("activation.silu_and_mul", "rows:returns_a_view"),
    "silu.unwritten_tail": ("activation.silu_and_mul", "rows:unwritten_tail"),
    "embedding.drops_rows": ("embedding.lookup", "rows:drops_rows"),
    "rope.ignores_interleaved": ("rope.apply", "rows:ignores_interleaved"),
    "rope.rotates_everything": ("rope.apply", "rows:rotates_everything"),
    "cache.wraps_negative_slots": ("cache.write", "cache:wraps_negative_slots"),
    "cache.writes_whole_pages": ("cache.write", "cache:writes_whole_pages"),
    "attention.ignores_window": ("attention.paged", "cache:ignores_window"),
    "experts.in_expert_order": ("moe.experts", "experts:in_expert_order"),
    "experts.capacity": ("moe.experts", "experts:capacity"),
    "experts.forgets_identity": ("moe.experts", "experts:forgets_identity"),
    "topk.last_of_equals": ("attention.index_topk", "sparse:last_of_equals"),
    "sparse.by_slot": ("attention.sparse_paged", "sparse:by_slot"),
    "sumexp.whole_row": ("sampling.block_sumexp", "sampling:whole_row"),
    "logprobs.ignores_temperature": ("sampling.logprobs", "sampling:ignores_temperature"),
    "sample.noise_by_row": ("sampling.sample", "sampling:noise_by_row"),
    "sample.keeps_ties": ("sampling.sample", "sampling:keeps_ties"),
    "norm.borrowed_order": ("norm.rms", "rows:honest_norm"),
}


def spec(name: str) -> KernelSpec:
    """The kernel of that name; every one declares `batch_invariant`."""
    operator, target = {**HONEST, **MUTANTS}[name]
    traits = dict(_TRAITS.get(operator, {}))
    if name == "norm.declares_too_much":
        traits["hidden"] = {64, 4096}
    prepare = _PREPARE.get(target)
    return KernelSpec(
        name,
        operator,
        "mutant",
        f"mutant_kernels.{target}",
        (dict.fromkeys(_ROLES[operator], "float32"),),
        prepare_weights=f"mutant_kernels.{prepare}" if prepare else None,
        features=frozenset({BATCH_INVARIANT}),
        traits=trait_table(traits),
        bit_order="aok/norm.rms@1" if name == "norm.borrowed_order" else None,
    )
