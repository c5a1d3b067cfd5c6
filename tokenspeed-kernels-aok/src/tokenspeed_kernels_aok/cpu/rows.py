"""Row operators: `norm.rms`, `norm.add_rms`, `rope.apply`, `activation.silu_and_mul` (rules 4 and 5 of the bit order)."""

from __future__ import annotations

import struct

import torch

from tokenspeed_kernels_aok.cpu.arguments import float_code, same_dtype, unit_stride
from tokenspeed_kernels_aok.cpu.library import library

_NORM = struct.Struct("12qdq")
_ROPE = struct.Struct("20q")
_SILU = struct.Struct("7q")

_rms_norm = library().kernel("rms_norm", _NORM)
_rope = library().kernel("rope", _ROPE)
_silu_and_mul = library().kernel("silu_and_mul", _SILU)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) rounded to x's dtype, times weight; over the last axis of x [T,H] or [T,heads,D], contiguous.

    Raises TypeError unless x and weight have one dtype, bf16 or fp32; ValueError for shapes that do not fit.
    """
    code = float_code("x", x)
    x = unit_stride(x)
    if x.dim() == 2:
        outer, h = x.shape
        inner, inner_stride = 1, 0
    else:
        outer, inner, h = x.shape
        inner_stride = x.stride(1)
    address = _scale_address(weight, h, x.dtype)
    out = x.new_empty(x.shape)
    if out.numel():
        _rms_norm(
            _NORM.pack(
                x.data_ptr(), 0, address, out.data_ptr(), 0,
                outer, inner, h, x.stride(0), inner_stride, 0, code, eps, torch.get_num_threads(),
            )
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the unrounded fp32 sum x + residual ([T,H] both), and the sum rounded once; both contiguous.

    Raises TypeError unless all have one dtype, bf16 or fp32; ValueError for shapes that do not fit.
    """
    code = float_code("x", x)
    same_dtype("residual", residual, x.dtype)
    if residual.shape != x.shape:
        raise ValueError(f"residual is {list(residual.shape)}, x is {list(x.shape)}")
    x, residual = unit_stride(x), unit_stride(residual)
    outer, h = x.shape
    address = _scale_address(weight, h, x.dtype)
    out, total = x.new_empty(outer, h), x.new_empty(outer, h)
    if out.numel():
        _rms_norm(
            _NORM.pack(
                x.data_ptr(), residual.data_ptr(), address, out.data_ptr(), total.data_ptr(),
                outer, 1, h, x.stride(0), 0, residual.stride(0), code, eps, torch.get_num_threads(),
            )
        )  # fmt: skip
    return out, total


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R features of q [T,Hq,D] and k [T,Hkv,D] by their positions (int64[T]); contiguous results.

    `cos_sin` is fp32 [positions,R]: R/2 cosines, then R/2 sines. A row whose position is outside the table is NaN.
    Raises TypeError for other dtypes, ValueError for shapes that do not fit.
    """
    code = float_code("q", q)
    same_dtype("k", k, q.dtype)
    same_dtype("cos_sin", cos_sin, torch.float32)
    same_dtype("positions", positions, torch.int64)
    q, k, cos_sin, positions = unit_stride(q), unit_stride(k), unit_stride(cos_sin), positions.contiguous()
    tokens, q_heads, d = q.shape
    k_heads = k.shape[1]
    rows, rotary = cos_sin.shape
    if k.shape[0] != tokens or k.shape[2] != d or positions.shape[0] != tokens or rotary > d or rotary % 2:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, positions {list(positions.shape)}, cos_sin {list(cos_sin.shape)}: "
            "expected [T,Hq,D], [T,Hkv,D], [T] and [positions,R] with R even and at most D"
        )
    q_out, k_out = q.new_empty(tokens, q_heads, d), k.new_empty(tokens, k_heads, d)
    if tokens and d:
        _rope(
            _ROPE.pack(
                q.data_ptr(), k.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), positions.data_ptr(),
                cos_sin.data_ptr(), tokens, q_heads, k_heads, d, rotary,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos_sin.stride(0), rows,
                bool(interleaved), code, torch.get_num_threads(),
            )
        )  # fmt: skip
    return q_out, k_out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T,2F], in fp32 with one rounding: [T,F].

    Raises TypeError for a dtype other than bf16 and fp32, ValueError for an odd number of columns.
    """
    code = float_code("gate_up", gate_up)
    tokens, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up has {both} columns, expected an even number: gate, then up")
    gate_up = unit_stride(gate_up)
    f = both // 2
    out = gate_up.new_empty(tokens, f)
    if tokens and f:
        _silu_and_mul(
            _SILU.pack(
                gate_up.data_ptr(), out.data_ptr(), tokens, f, gate_up.stride(0), code, torch.get_num_threads()
            )
        )
    return out


def _scale_address(weight: torch.Tensor, width: int, dtype: torch.dtype) -> int:
    same_dtype("weight", weight, dtype)
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"weight is {list(weight.shape)}, expected a contiguous [{width}]")
    return weight.data_ptr()
