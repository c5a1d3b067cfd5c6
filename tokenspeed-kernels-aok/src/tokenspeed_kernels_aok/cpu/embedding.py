"""`embedding.lookup`: rows of a table, plain or packed for the output head that shares it."""

from __future__ import annotations

import struct

import torch

from tokenspeed_kernels_aok.cpu.arguments import float_code
from tokenspeed_kernels_aok.cpu.gemm import PackedWeight
from tokenspeed_kernels_aok.cpu.library import library

_EMBEDDING = struct.Struct("9q")

_embedding = library().kernel("embedding", _EMBEDDING)


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
