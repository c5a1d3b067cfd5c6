"""`rope.apply`: first * cos - second * sin and second * cos + first * sin, each product and sum rounded on its own.

Elementwise in fp32 from the fp32 table, then one rounding to the output; features past the rotated ones pass through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from tokenspeed_kernels_aok.triton.arith import narrow
from tokenspeed_kernels_aok.triton.launch import INTERPRETED, TRITON_DTYPES, Form, launch

# Heads that a program rotates with one load of the angles.
_HEADS = 8


@triton.jit
def _rotate_heads(
    x,
    out,
    head_stride,
    first_head,
    cos,
    sin,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TILE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EMULATE: tl.constexpr,
):
    head = first_head + tl.arange(0, TILE)
    lane = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        first_at = 2 * lane
        second_at = 2 * lane + 1
    else:
        first_at = lane
        second_at = lane + R // 2
    inside = (head < HEADS)[:, None] & (lane < R // 2)[None, :]
    source = x + head[:, None] * head_stride
    target = out + head[:, None] * D
    first = tl.load(source + first_at[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_at[None, :], mask=inside, other=0.0).to(tl.float32)
    new_first = first * cos[None, :] - second * sin[None, :]
    new_second = second * cos[None, :] + first * sin[None, :]
    tl.store(target + first_at[None, :], narrow(new_first, out.dtype.element_ty, EMULATE), mask=inside)
    tl.store(target + second_at[None, :], narrow(new_second, out.dtype.element_ty, EMULATE), mask=inside)
    if R < D:
        rest = R + tl.arange(0, BLOCK_REST)
        kept = (head < HEADS)[:, None] & (rest < D)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=kept), mask=kept)


@triton.jit
def rope_kernel(
    q,
    k,
    q_out,
    k_out,
    positions,
    cos_sin,
    q_token,
    q_head,
    k_token,
    k_head,
    table_row,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TILE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One token (axis 0) and TILE heads of q or of k (axis 1); q_out and k_out are contiguous."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lane = tl.arange(0, BLOCK_HALF)
    angles = cos_sin + tl.load(positions + token) * table_row
    cos = tl.load(angles + lane, mask=lane < R // 2, other=0.0)
    sin = tl.load(angles + R // 2 + lane, mask=lane < R // 2, other=0.0)
    q_blocks: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    if block < q_blocks:
        _rotate_heads(
            q + token * q_token,
            q_out + token * (Q_HEADS * D),
            q_head,
            block * TILE,
            cos,
            sin,
            Q_HEADS,
            D,
            R,
            BLOCK_HALF,
            BLOCK_REST,
            TILE,
            INTERLEAVED,
            EMULATE,
        )
    else:
        _rotate_heads(
            k + token * k_token,
            k_out + token * (K_HEADS * D),
            k_head,
            (block - q_blocks) * TILE,
            cos,
            sin,
            K_HEADS,
            D,
            R,
            BLOCK_HALF,
            BLOCK_REST,
            TILE,
            INTERLEAVED,
            EMULATE,
        )


def apply(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T,Hq,D] and k [T,Hkv,D] rotated by the angles of `positions` (int64[T]); both contiguous."""
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    tokens, q_heads, head_dim = q.shape
    if tokens:
        constants = _constants(q_heads, k.shape[1], head_dim, cos_sin.shape[1], interleaved)
        tile = constants["TILE"]
        launch(
            rope_kernel,
            (tokens, triton.cdiv(q_heads, tile) + triton.cdiv(k.shape[1], tile)),
            q.device,
            q,
            k,
            q_out,
            k_out,
            positions,
            cos_sin,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos_sin.stride(0),
            **constants,
            num_warps=4,
        )
    return q_out, k_out


def _constants(q_heads: int, k_heads: int, head_dim: int, rotary_dim: int, interleaved: bool) -> dict[str, Any]:
    return {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "D": head_dim,
        "R": rotary_dim,
        "BLOCK_HALF": triton.next_power_of_2(rotary_dim // 2),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_dim - rotary_dim)),
        "TILE": _HEADS,
        "INTERLEAVED": interleaved,
        "EMULATE": INTERPRETED,
    }


def forms(target: str) -> Iterator[Form]:
    """Whole and partial rotation, both pairings."""
    for dtype in TRITON_DTYPES.values():
        for rotary_dim, interleaved in ((128, False), (128, True), (64, False)):
            tensors = dict.fromkeys(("q", "k", "q_out", "k_out"), f"*{dtype}")
            strides = dict.fromkeys(("q_token", "q_head", "k_token", "k_head", "table_row"), "i32")
            yield Form(
                name=f"rope.apply.{dtype}.{rotary_dim}of128{'.interleaved' if interleaved else ''}",
                target=target,
                kernel=rope_kernel,
                signature=tensors | {"positions": "*i64", "cos_sin": "*fp32"} | strides,
                constants=_constants(32, 8, 128, rotary_dim, interleaved) | {"EMULATE": False},
                aligned=(*tensors, "positions", "cos_sin", *strides),
            )
