"""`norm.rms` and `norm.add_rms`: fp32 statistics by the fixed tree of `arith.tree_sum` over the zero-padded row.

mean = tree(x * x) / H; y = x * (1 / sqrt(mean + eps)) with IEEE division and square root, rounded to x's dtype, times
weight, rounded. `add_rms` takes the unrounded fp32 sum of x and residual as its x.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from tokenspeed_kernels_aok.triton.arith import narrow, tree_sum
from tokenspeed_kernels_aok.triton.launch import INTERPRETED, TRITON_DTYPES, Form, launch

# Elements that a program holds; rows shorter than this are taken several at a time.
_TILE = 2048


@triton.jit(do_not_specialize=["rows", "inner"])
def rms_kernel(
    x,
    residual,
    weight,
    out,
    total,
    rows,
    inner,
    x_outer,
    x_inner,
    residual_row,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    FUSED: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """ROWS rows; row r of x starts at (r // inner) * x_outer + (r % inner) * x_inner; out and total are contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_H)
    inside = (row < rows)[:, None] & (lane < H)[None, :]
    x_row = (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner
    values = tl.load(x + x_row[:, None] + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    target = row.to(tl.int64)[:, None] * H + lane[None, :]
    if FUSED:
        other = tl.load(residual + row.to(tl.int64)[:, None] * residual_row + lane[None, :], mask=inside, other=0.0)
        values = values + other.to(tl.float32)
        tl.store(total + target, narrow(values, total.dtype.element_ty, EMULATE), mask=inside)
    mean = tl.math.div_rn(tree_sum(values * values), tl.full((ROWS,), H, tl.float32))
    inverse = tl.math.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))
    scaled = narrow(values * inverse[:, None], x.dtype.element_ty, EMULATE).to(tl.float32)
    scale = tl.load(weight + lane, mask=lane < H, other=0.0).to(tl.float32)
    tl.store(out + target, narrow(scaled * scale[None, :], out.dtype.element_ty, EMULATE), mask=inside)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of x ([T,H] or [T,heads,D]) over its last axis; contiguous, in x's dtype.

    Raises ValueError when the weight has another width.
    """
    _check_weight(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner, x_inner = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    if out.numel():
        _launch(x, x, weight, out, out, inner, (x.stride(0), x_inner, 0), eps, fused=False)
    return out


def add_rms(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the unrounded sum of x and residual, the sum rounded once), both [T,H] and contiguous.

    Raises ValueError for shapes that do not fit.
    """
    _check_weight(x, weight)
    if residual.shape != x.shape:
        raise ValueError(f"residual is {list(residual.shape)}, x is {list(x.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    if out.numel():
        strides = (x.stride(0), 0, residual.stride(0))
        _launch(x, residual, weight, out, total, 1, strides, eps, fused=True)
    return out, total


def _check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight is {list(weight.shape)}, x is {list(x.shape)}")


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    inner: int,
    strides: tuple[int, int, int],
    eps: float,
    *,
    fused: bool,
) -> None:
    hidden = x.shape[-1]
    rows = out.numel() // hidden
    constants, num_warps = _shape(hidden, fused)
    operands = (x, residual, weight, out, total)
    grid = (triton.cdiv(rows, constants["ROWS"]),)
    launch(rms_kernel, grid, out.device, *operands, rows, inner, *strides, eps, **constants, num_warps=num_warps)


def _shape(hidden: int, fused: bool) -> tuple[dict[str, Any], int]:
    """Constants and warps for rows of `hidden` elements, whatever their number."""
    block = triton.next_power_of_2(hidden)
    rows = max(1, _TILE // block)
    constants = {"H": hidden, "BLOCK_H": block, "ROWS": rows, "FUSED": fused, "EMULATE": INTERPRETED}
    return constants, 4 if block <= 4096 else 8 if block <= 8192 else 16


def forms(target: str) -> Iterator[Form]:
    """Heads, and hidden sizes from small to the largest dense models, plain and fused."""
    for dtype in TRITON_DTYPES.values():
        for hidden in (128, 1024, 4096, 16384):
            for fused in (False, True):
                constants, num_warps = _shape(hidden, fused)
                tensors = dict.fromkeys(("x", "residual", "weight", "out", "total"), f"*{dtype}")
                sizes = dict.fromkeys(("rows", "inner", "x_outer", "x_inner", "residual_row"), "i32")
                yield Form(
                    name=f"norm.{'add_rms' if fused else 'rms'}.{dtype}.{hidden}",
                    target=target,
                    kernel=rms_kernel,
                    signature=tensors | sizes | {"eps": "fp32"},
                    constants=constants | {"EMULATE": False},
                    aligned=(*tensors, "x_outer", "x_inner", "residual_row"),
                    num_warps=num_warps,
                )
