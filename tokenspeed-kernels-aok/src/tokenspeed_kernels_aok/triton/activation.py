"""`activation.silu_and_mul`: gate / (1 + exp(-gate)) * up in fp32, IEEE division, one rounding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tokenspeed_kernels_aok.triton.arith import narrow
from tokenspeed_kernels_aok.triton.launch import INTERPRETED, TRITON_DTYPES, Form, launch
from tokenspeed_kernels_aok.triton.noise import exp

_BLOCK = 1024


@triton.jit
def silu_kernel(gate_up, out, row_stride, F: tl.constexpr, BLOCK: tl.constexpr, EMULATE: tl.constexpr):
    """One token (axis 0) and BLOCK of its features (axis 1)."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < F
    gate = tl.load(gate_up + token * row_stride + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * row_stride + F + lane, mask=inside, other=0.0).to(tl.float32)
    value = tl.math.div_rn(gate, 1.0 + exp(-gate)) * up
    tl.store(out + token * F + lane, narrow(value, out.dtype.element_ty, EMULATE), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T,2F]: [T,F]."""
    tokens, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, features)
    if out.numel():
        launch(
            silu_kernel,
            (tokens, triton.cdiv(features, _BLOCK)),
            out.device,
            gate_up,
            out,
            gate_up.stride(0),
            F=features,
            BLOCK=_BLOCK,
            EMULATE=INTERPRETED,
            num_warps=4,
        )
    return out


def forms(target: str) -> Iterator[Form]:
    """One size for each dtype."""
    for dtype in TRITON_DTYPES.values():
        yield Form(
            name=f"activation.silu_and_mul.{dtype}",
            target=target,
            kernel=silu_kernel,
            signature={"gate_up": f"*{dtype}", "out": f"*{dtype}", "row_stride": "i32"},
            constants={"F": 12288, "BLOCK": _BLOCK, "EMULATE": False},
            aligned=("gate_up", "out", "row_stride"),
        )
