"""The Triton kernels as data. Imports neither torch nor triton.

A bit order is named `aok-triton/OPERATOR@VERSION`, apart from the CPU kernels' names until GPUs have confirmed where
the two agree. Kernels that use the matrix unit have an order for each architecture, because the sum inside an
instruction is the hardware's own: `aok-triton/gemm.linear.sm90@1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tokenspeed.kernels.spec import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
    KernelSpec,
    MachineRequirement,
    Priority,
    TraitValue,
    trait_table,
)

ARCHITECTURES = ("sm80", "sm86", "sm89", "sm90", "sm100")
"""What the tile tables cover."""

DTYPES = ("bfloat16", "float16", "float32")

HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
LARGEST_GROUP = 32

_KV_LAYOUT: Mapping[str, Iterable[TraitValue]] = {"kv_layout": ("nhd",)}
_ATTENTION: Mapping[str, Iterable[TraitValue]] = {
    **_KV_LAYOUT,
    "head_dim": HEAD_DIMS,
    "group_size": range(1, LARGEST_GROUP + 1),
}
_BLOCK_ORDER: Mapping[str, Iterable[TraitValue]] = {"block_order": ("aok_tree",)}


def _spec(
    operator: str,
    implementation: str,
    *roles: str,
    prepare: str | None = None,
    traits: Mapping[str, Iterable[TraitValue]] | None = None,
    architecture: str | None = None,
    row_counts: str | None = None,
) -> KernelSpec:
    """A kernel whose `roles` all have one dtype; for one architecture, or with the same order on all of them."""
    module = "tokenspeed_kernels_aok.triton"
    suffix = f".{architecture}" if architecture else ""
    return KernelSpec(
        name=f"aok.triton.{operator}{suffix}",
        operator=operator,
        solution="aok",
        implementation=f"{module}.{implementation}",
        signatures=tuple(dict.fromkeys(roles, dtype) for dtype in DTYPES),
        prepare_weights=f"{module}.{prepare}" if prepare else None,
        machine=MachineRequirement(
            device="cuda",
            arch=frozenset({architecture} if architecture else ARCHITECTURES),
            libraries=frozenset({"triton"}),
        ),
        features=frozenset({BATCH_INVARIANT, CUDA_GRAPH}),
        traits=trait_table(traits or {}),
        priority=Priority.PERFORMANT,
        bit_order=f"aok-triton/{operator}{suffix}@1",
        row_counts=f"{module}.{row_counts}" if row_counts else None,
    )


def _matrix_specs(arch: str) -> Iterator[KernelSpec]:
    counts, pages = "gemm:row_counts", "attention:row_counts"
    prepare = "gemm:prepare_linear"
    yield _spec("gemm.linear", "gemm:linear", "x", "weight", prepare=prepare, architecture=arch, row_counts=counts)
    yield _spec("gemm.batched", "gemm:batched", "x", "weight", architecture=arch, row_counts=counts)
    yield _spec("attention.paged", "attention:paged", "x", "kv", traits=_ATTENTION, architecture=arch, row_counts=pages)


def triton_specs() -> tuple[KernelSpec, ...]:
    """One spec for each operator, and for each architecture where the order is the architecture's."""
    return (
        _spec("embedding.lookup", "embedding:lookup", "weight"),
        _spec("norm.rms", "norm:rms", "x", "weight"),
        _spec("norm.add_rms", "norm:add_rms", "x", "weight"),
        _spec("rope.apply", "rope:apply", "x"),
        _spec("activation.silu_and_mul", "activation:silu_and_mul", "x"),
        _spec("cache.write", "cache:write", "x", "kv", traits=_KV_LAYOUT),
        _spec("sampling.block_sumexp", "logprobs:block_sumexp", "logits", traits=_BLOCK_ORDER),
        _spec("sampling.logprobs", "logprobs:logprobs", "logits", traits=_BLOCK_ORDER),
        _spec("sampling.sample", "sample:sample", "logits", traits={"stream": {"per-request"}}),
        *(spec for architecture in ARCHITECTURES for spec in _matrix_specs(architecture)),
    )
