"""Projections: `gemm.linear` and `gemm.batched` over weights that were packed once (rules 1 and 2 of the bit order)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from tokenspeed import huge_pages
from tokenspeed_kernels_aok.cpu.arguments import DTYPE_CODES, float_code, vector_address
from tokenspeed_kernels_aok.cpu.library import KernelCall
from tokenspeed_kernels_aok.cpu.selfcheck import checked, pattern

_GEMM = struct.Struct("16q")
_PACK = struct.Struct("8q")
_PANEL_COLUMNS = 16
_TILE_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N,K], or [groups,N,K], packed into panels of 16 columns (`csrc/panels.h`).

    `data` (uint8) owns the memory; `address` points into it. `embedding.lookup` reads rows of it as well, so a table
    that is tied to the output head is kept once.
    """

    data: torch.Tensor
    address: int
    n: int
    k: int
    groups: int
    group_bytes: int
    dtype: torch.dtype
    code: int


def packed_bytes(n: int, k: int, itemsize: int) -> int:
    """Bytes of one packed weight: N is padded to a multiple of 64, K to an even number."""
    return (n + _TILE_COLUMNS - 1) // _TILE_COLUMNS * _TILE_COLUMNS * ((k + 1) // 2 * 2) * itemsize


def prepare_batched(weight: torch.Tensor) -> PackedWeight:
    """Pack a weight [groups,N,K] (bf16 or fp32, any strides). Takes memory for one copy of this weight.

    Raises TypeError for other dtypes.
    """
    groups, n, k = weight.shape
    code = float_code("weight", weight)
    group_bytes = packed_bytes(n, k, weight.itemsize)
    data = huge_pages.zeros(groups * group_bytes, dtype=torch.uint8)
    packed = PackedWeight(data, data.data_ptr(), n, k, groups, group_bytes, weight.dtype, code)
    threads = torch.get_num_threads()
    for group, w in enumerate(weight):
        address = packed.address + group * group_bytes
        _pack_panels(_PACK.pack(w.data_ptr(), address, n, k, w.stride(0), w.stride(1), code, threads))
    return packed


def prepare_linear(weight: torch.Tensor | PackedWeight) -> PackedWeight:
    """Pack a weight [N,K] (bf16 or fp32, any strides); one that is packed already is returned as it is."""
    return weight if isinstance(weight, PackedWeight) else prepare_batched(weight.unsqueeze(0))


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T,K] times the transpose of the packed weight [N,K], plus bias [N] (weight's dtype): [T,N] in x's dtype.

    Raises TypeError for a dtype other than bf16 and fp32, ValueError for shapes that do not fit.
    """
    rows, k = x.shape
    code = float_code("x", x)
    n = weight.n
    if k != weight.k:
        raise ValueError(f"x has {k} columns, the weight [{n},{weight.k}] takes {weight.k}")
    row_stride, unit = x.stride()
    if unit != 1:
        x, row_stride = x.contiguous(), k
    bias_address = 0 if bias is None else vector_address("bias", bias, n, weight.dtype)
    out = x.new_empty(rows, n)
    if rows and n:
        _gemm(
            _GEMM.pack(
                x.data_ptr(), weight.address, bias_address, out.data_ptr(),
                1, rows, k, n, 0, row_stride, 0, n, 0, code, weight.code, torch.get_num_threads(),
            )
        )  # fmt: skip
    return out


def batched(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """For each group g: x[:, g] times the transpose of weight[g]; x [T,G,K], weight [G,N,K] packed: [T,G,N].

    Raises TypeError for a dtype other than bf16 and fp32, ValueError for shapes that do not fit.
    """
    rows, groups, k = x.shape
    code = float_code("x", x)
    if k != weight.k or groups != weight.groups:
        raise ValueError(
            f"x is [T,{groups},{k}], the weight [{weight.groups},{weight.n},{weight.k}] takes "
            f"[T,{weight.groups},{weight.k}]"
        )
    if x.stride(2) != 1:
        x = x.contiguous()
    n = weight.n
    out = x.new_empty(rows, groups, n)
    if rows and groups and n:
        _gemm(
            _GEMM.pack(
                x.data_ptr(), weight.address, 0, out.data_ptr(),
                groups, rows, k, n, x.stride(1), x.stride(0), n, groups * n, weight.group_bytes,
                code, weight.code, torch.get_num_threads(),
            )
        )  # fmt: skip
    return out


def _check_pack(call: KernelCall) -> tuple[torch.Tensor, ...]:
    packed = []
    for dtype in DTYPE_CODES:
        w = pattern(70, 33, dtype=dtype)
        packed.append(torch.zeros(packed_bytes(70, 33, w.itemsize), dtype=torch.uint8))
        call(_PACK.pack(w.data_ptr(), packed[-1].data_ptr(), 70, 33, 33, 1, DTYPE_CODES[dtype], 1))
    return tuple(packed)


def _check_gemm(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    m, n, k = 14, 70, 301  # every height of tile up to 7, partial panels, more than one block of K, an odd K
    for weight_dtype in DTYPE_CODES:
        weight = prepare_linear(pattern(n, k, dtype=weight_dtype))
        bias = pattern(n, dtype=weight_dtype, salt=7)
        for dtype in DTYPE_CODES:
            x = pattern(m, k, dtype=dtype, salt=11)
            for rows in (1, 2, 3, 4, 5, 6, m):
                out = torch.empty(rows, n, dtype=dtype)
                call(
                    _GEMM.pack(
                        x.data_ptr(), weight.address, bias.data_ptr(), out.data_ptr(), 1, rows, k, n, 0, k, 0, n, 0,
                        DTYPE_CODES[dtype], weight.code, 1,
                    )
                )  # fmt: skip
                outputs.append(out)
    return tuple(outputs)


_pack_panels = checked("pack", _PACK, _check_pack)
_gemm = checked("gemm", _GEMM, _check_gemm)
