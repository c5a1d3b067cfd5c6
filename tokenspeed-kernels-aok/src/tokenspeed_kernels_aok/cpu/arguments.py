"""What every operator checks and packs in the same way before it calls native code."""

from __future__ import annotations

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Element types as the native code numbers them (`csrc/abi.h`)."""


def float_code(what: str, tensor: torch.Tensor) -> int:
    """The code of a tensor's dtype. Raises TypeError unless it is bf16 or fp32 on the CPU."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None or not tensor.is_cpu:
        raise TypeError(
            f"{what}: {tensor.dtype} on {tensor.device}; the aok CPU kernels take bfloat16 and float32 on cpu"
        )
    return code


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself when its last axis has unit stride, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def same_dtype(what: str, tensor: torch.Tensor, expected: torch.dtype) -> None:
    """Raise TypeError unless `tensor` has the expected dtype."""
    if tensor.dtype != expected:
        raise TypeError(f"{what}: {tensor.dtype}, expected {expected}")


def vector_address(what: str, vector: torch.Tensor, width: int, dtype: torch.dtype) -> int:
    """The address of a contiguous vector of `width` elements. Raises TypeError and ValueError for another."""
    if vector.dtype is not dtype:
        raise TypeError(f"{what}: {vector.dtype}, expected {dtype}")
    if vector.dim() != 1 or vector.numel() != width or not vector.is_contiguous():
        raise ValueError(f"{what} is {list(vector.shape)}, expected a contiguous [{width}]")
    return vector.data_ptr()
