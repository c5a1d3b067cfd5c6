"""What this distribution registers with tokenspeed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed import BATCH_INVARIANT, KernelSpec, MachineRequirement, Priority, hookimpl, trait_table
from tokenspeed.kernels.spec import StoredPart

TOKENSPEED_API = 1

FORMAT = "example_int8"
"""`quant_method` in a checkpoint's config.json."""


@hookimpl
def tokenspeed_kernels() -> Iterable[KernelSpec]:
    """`gemm.linear` for checkpoints of the format: each row of a weight as int8 and one scale."""
    return [
        KernelSpec(
            name="int8.gemm.linear",
            operator="gemm.linear",
            solution="int8",
            implementation="tokenspeed_kernels_int8.gemm:linear",
            prepare_weights="tokenspeed_kernels_int8.gemm:prepare",
            # `weight` is the dtype of a bias; the weight's own is the format's.
            signatures=tuple({"x": dtype, "weight": dtype} for dtype in ("float32", "bfloat16")),
            machine=MachineRequirement(device="cpu"),
            features=frozenset({BATCH_INVARIANT}),
            traits=trait_table({"weight_format": {FORMAT}}),
            stored=(StoredPart("weight", "int8", "N,K"), StoredPart("weight_scale", "float32", "N")),
            quantise="tokenspeed_kernels_int8.gemm:quantise",
            bit_order="example-int8/gemm.linear@1",
            priority=Priority.PLUGIN,
        )
    ]
