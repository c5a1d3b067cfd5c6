"""`embedding.lookup`: rows of a table, plain or packed for the output head that shares it."""

from __future__ import annotations

import struct

import torch

from tokenspeed_kernels_aok.cpu.arguments import DTYPE_CODES, float_code
from tokenspeed_kernels_aok.cpu.gemm import PackedWeight, prepare_linear
from tokenspeed_kernels_aok.cpu.library import KernelCall
from tokenspeed_kernels_aok.cpu.selfcheck import checked, pattern

_EMBEDDING = struct.Struct("9q")


def embedding(ids: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """Rows `ids` (int64[T]) of `weight` [V,H], a tensor or what `gemm.linear` packed: [T,H], copied bit for bit.

    A row whose id is outside the table is NaN. Raises TypeError for other dtypes.
    """
    if ids.dtype != torch.int64 or not ids.is_cpu:
        raise TypeError(f"ids: {ids.dtype} on {ids.device}, expected torch.int64 on cpu")
    ids = ids.contiguous()
    if isinstance(weight, PackedWeight):
        entries, width, dtype, code = weight.n, weight.k, weight.dtype, weight.code
        address, row_stride, packed = weight.address, 0, 1
    else:
        if weight.stride(-1) != 1:
            raise ValueError(f"weight has strides {weight.stride()}, expected unit stride in the last axis")
        entries, width = weight.shape
        dtype, code = weight.dtype, float_code("weight", weight)
        address, row_stride, packed = weight.data_ptr(), weight.stride(0), 0
    (tokens,) = ids.shape
    out = torch.empty(tokens, width, dtype=dtype)
    if tokens and width:
        _embedding(
            _EMBEDDING.pack(
                ids.data_ptr(), address, out.data_ptr(),
                tokens, width, entries, row_stride, code * 2 + packed, torch.get_num_threads(),
            )
        )  # fmt: skip
    return out


def _check_embedding(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    ids = torch.tensor([0, 20, -1, 3, 21])
    for dtype, code in DTYPE_CODES.items():
        table = pattern(21, 33, dtype=dtype)
        packed_table = prepare_linear(table)
        for address, stride, packed in ((table.data_ptr(), 33, 0), (packed_table.address, 0, 1)):
            out = torch.empty(5, 33, dtype=dtype)
            call(_EMBEDDING.pack(ids.data_ptr(), address, out.data_ptr(), 5, 33, 21, stride, code * 2 + packed, 1))
            outputs.append(out)
    return tuple(outputs)


_embedding = checked("embedding", _EMBEDDING, _check_embedding)
