"""`embedding.lookup`: rows copied bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tokenspeed_kernels_aok.triton.launch import TRITON_DTYPES, Form, launch

_BLOCK = 2048


@triton.jit
def lookup_kernel(ids, weight, out, weight_row, H: tl.constexpr, BLOCK: tl.constexpr):
    """One token (axis 0) and BLOCK of its features (axis 1)."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token)
    values = tl.load(weight + row * weight_row + lane, mask=lane < H)
    tl.store(out + token * H + lane, values, mask=lane < H)


def lookup(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows `ids` (int64[T]) of `weight` ([V,H]): [T,H]."""
    hidden = weight.shape[1]
    out = weight.new_empty(len(ids), hidden)
    if out.numel():
        grid = (len(ids), triton.cdiv(hidden, _BLOCK))
        launch(lookup_kernel, grid, out.device, ids, weight, out, weight.stride(0), H=hidden, BLOCK=_BLOCK, num_warps=4)
    return out


def forms(target: str) -> Iterator[Form]:
    """One hidden size for each dtype."""
    for dtype in TRITON_DTYPES.values():
        yield Form(
            name=f"embedding.lookup.{dtype}",
            target=target,
            kernel=lookup_kernel,
            signature={"ids": "*i64", "weight": f"*{dtype}", "out": f"*{dtype}", "weight_row": "i32"},
            constants={"H": 4096, "BLOCK": _BLOCK},
            aligned=("ids", "weight", "out", "weight_row"),
        )
