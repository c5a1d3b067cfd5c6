"""Row operators: norms, rotary embedding and SiLU (rules 2 to 4 and 15 of the bit order, docs/design/bits.md)."""

from __future__ import annotations

import struct

import torch

from tokenspeed_kernels_aok.cpu.arguments import DTYPE_CODES, float_code, same_dtype, unit_stride, vector_address
from tokenspeed_kernels_aok.cpu.library import KernelCall
from tokenspeed_kernels_aok.cpu.selfcheck import checked, pattern

_NORM = struct.Struct("12qdq")
_LAYER_NORM = struct.Struct("7qd2q")
_ROPE = struct.Struct("20q")
_SILU = struct.Struct("7q")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) rounded to x's dtype, times weight; over the last axis of x [T,H] or [T,heads,D], contiguous.

    Raises TypeError unless x and weight have one dtype, bf16 or fp32; ValueError for shapes that do not fit.
    """
    code = float_code("x", x)
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 2:
        outer, h = x.shape
        inner, inner_stride = 1, 0
        out = x.new_empty(outer, h)
    else:
        outer, inner, h = x.shape
        inner_stride = x.stride(1)
        out = x.new_empty(outer, inner, h)
    address = vector_address("weight", weight, h, x.dtype)
    if outer and inner and h:
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
    address = vector_address("weight", weight, h, x.dtype)
    out, total = x.new_empty(outer, h), x.new_empty(outer, h)
    if outer and h:
        _rms_norm(
            _NORM.pack(
                x.data_ptr(), residual.data_ptr(), address, out.data_ptr(), total.data_ptr(),
                outer, 1, h, x.stride(0), 0, residual.stride(0), code, eps, torch.get_num_threads(),
            )
        )  # fmt: skip
    return out, total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / standard deviation of x [T,H], times weight [H], plus bias [H]; one rounding, contiguous.

    Raises TypeError unless all have one dtype, bf16 or fp32; ValueError for shapes that do not fit.
    """
    code = float_code("x", x)
    x = unit_stride(x)
    rows, h = x.shape
    addresses = [vector_address(what, vector, h, x.dtype) for what, vector in (("weight", weight), ("bias", bias))]
    out = x.new_empty(rows, h)
    if rows and h:
        _layer_norm(
            _LAYER_NORM.pack(
                x.data_ptr(), *addresses, out.data_ptr(), rows, h, x.stride(0), eps, code, torch.get_num_threads()
            )
        )
    return out


def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R features of q [T,Hq,D] and k [T,Hkv,D] by their positions (int64[T]); contiguous results.

    `cos_sin` is fp32 [positions,R]: R/2 cosines, then R/2 sines. A row whose position is outside the table is NaN.
    Raises TypeError for other dtypes, ValueError for shapes that do not fit.
    """
    code = float_code("q", q)
    if k.dtype is not q.dtype or cos_sin.dtype is not torch.float32 or positions.dtype is not torch.int64:
        raise TypeError(
            f"q {q.dtype}, k {k.dtype}, positions {positions.dtype}, cos_sin {cos_sin.dtype}: "
            "expected q and k alike, torch.int64 and torch.float32"
        )
    tokens, q_heads, d = q.shape
    k_tokens, k_heads, k_width = k.shape
    rows, rotary = cos_sin.shape
    if k_tokens != tokens or k_width != d or positions.numel() != tokens or rotary > d or rotary % 2:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, positions {list(positions.shape)}, cos_sin {list(cos_sin.shape)}: "
            "expected [T,Hq,D], [T,Hkv,D], [T] and [positions,R] with R even and at most D"
        )
    q_strides, k_strides, (row_stride, unit) = q.stride(), k.stride(), cos_sin.stride()
    strided = d > 1 and (q_strides[2] != 1 or k_strides[2] != 1)
    if strided or (rotary > 1 and unit != 1) or not positions.is_contiguous():
        return rope(q.contiguous(), k.contiguous(), positions.contiguous(), cos_sin.contiguous(), interleaved)
    q_out, k_out = q.new_empty(tokens, q_heads, d), q.new_empty(tokens, k_heads, d)
    if tokens and d:
        _rope(
            _ROPE.pack(
                q.data_ptr(), k.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), positions.data_ptr(),
                cos_sin.data_ptr(), tokens, q_heads, k_heads, d, rotary,
                q_strides[0], q_strides[1], k_strides[0], k_strides[1], row_stride, rows,
                1 if interleaved else 0, code, torch.get_num_threads(),
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
    row_stride, unit = gate_up.stride()
    if unit != 1:
        gate_up, row_stride = gate_up.contiguous(), both
    f = both // 2
    out = gate_up.new_empty(tokens, f)
    if tokens and f:
        _silu_and_mul(
            _SILU.pack(gate_up.data_ptr(), out.data_ptr(), tokens, f, row_stride, code, torch.get_num_threads())
        )
    return out


_CHECKED_WIDTH = 147  # whole groups of 64 lanes, whole vectors, and a remainder


def _check_norm(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    for dtype, code in DTYPE_CODES.items():
        x, residual, weight = (pattern(2, _CHECKED_WIDTH, dtype=dtype, salt=salt) for salt in (0, 3, 5))
        for added in (0, residual.data_ptr()):
            out, total = torch.zeros_like(x), torch.zeros_like(x)
            call(
                _NORM.pack(
                    x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), total.data_ptr(),
                    2, 1, _CHECKED_WIDTH, _CHECKED_WIDTH, 0, _CHECKED_WIDTH, code, 1e-6, 1,
                )
            )  # fmt: skip
            outputs += [out, total]
    return tuple(outputs)


def _check_layer_norm(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    for dtype, code in DTYPE_CODES.items():
        x, weight, bias = (pattern(2, _CHECKED_WIDTH, dtype=dtype, salt=salt) for salt in (0, 3, 5))
        out = torch.zeros_like(x)
        call(
            _LAYER_NORM.pack(
                x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr(),
                2, _CHECKED_WIDTH, _CHECKED_WIDTH, 1e-6, code, 1,
            )
        )  # fmt: skip
        outputs.append(out)
    return tuple(outputs)


def _check_rope(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    heads, d, rotary = 3, 44, 38
    positions, cos_sin = torch.tensor([1, 0, 2]), pattern(2, rotary, dtype=torch.float32, salt=9)
    for dtype, code in DTYPE_CODES.items():
        x = pattern(3, heads, d, dtype=dtype)
        for interleaved in (0, 1):
            q_out, k_out = torch.empty_like(x), torch.empty_like(x)
            call(
                _ROPE.pack(
                    x.data_ptr(), x.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), positions.data_ptr(),
                    cos_sin.data_ptr(), 3, heads, heads, d, rotary, heads * d, d, heads * d, d, rotary, 2,
                    interleaved, code, 1,
                )
            )  # fmt: skip
            outputs += [q_out, k_out]
    return tuple(outputs)


def _check_silu(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    for dtype, code in DTYPE_CODES.items():
        x = pattern(2, 2 * _CHECKED_WIDTH, dtype=dtype)
        out = torch.empty(2, _CHECKED_WIDTH, dtype=dtype)
        call(_SILU.pack(x.data_ptr(), out.data_ptr(), 2, _CHECKED_WIDTH, 2 * _CHECKED_WIDTH, code, 1))
        outputs.append(out)
    return tuple(outputs)


_rms_norm = checked("rms_norm", _NORM, _check_norm)
_layer_norm = checked("layer_norm", _LAYER_NORM, _check_layer_norm)
_rope = checked("rope", _ROPE, _check_rope)
_silu_and_mul = checked("silu_and_mul", _SILU, _check_silu)
