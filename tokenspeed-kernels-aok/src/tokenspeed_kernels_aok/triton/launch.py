"""What every launch has in common: the options of the promise, the device, and the interpreter's known gaps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether Triton interprets kernels in NumPy (TRITON_INTERPRET=1), decided once at import as Triton does.

Triton 3.9's interpreter multiplies bf16 operands of `tl.dot` wrongly and does not round fp32 to bf16 to nearest even;
kernels take this value as the constexpr EMULATE and then widen operands and round by integer arithmetic.
"""

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "launch_pdl": False}
"""Launch options of every kernel: no contraction of multiply and add, no programmatic dependent launch."""

INTERPRETER_ARCH = "sm90"
"""Whose tile table interpreted runs follow."""


@dataclass(frozen=True)
class Form:
    """One compiled form of a kernel, for ahead-of-time checks: what a launch on `target` would compile.

    `signature` gives each run-time argument its Triton type, in order; `constants` the constexpr arguments; `aligned`
    the arguments that are multiples of 16 (addresses in bytes), as they are for model-sized tensors.
    """

    name: str
    target: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    tags: frozenset[str] = field(default_factory=frozenset)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Launch `kernel` on the current stream of `device`, where its operands are.

    The one place that does: Triton takes the calling thread's current device, whose operands these need not be.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **constants, **OPTIONS)
    else:
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants, **OPTIONS)


@cache
def arch_of(device: torch.device) -> str:
    """`sm90` for a Hopper GPU; interpreted runs on the CPU count as `INTERPRETER_ARCH`."""
    if device.type != "cuda":
        if INTERPRETED:
            return INTERPRETER_ARCH
        raise ValueError(f"Triton kernels need CUDA tensors, got one on {device}")
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; a small number for interpreted runs, so that persistence is exercised."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


TRITON_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def check_dtypes(**operands: torch.Tensor) -> None:
    """Raise TypeError unless the operands, by name, have one dtype of `TRITON_DTYPES`.

    The matrix unit takes no other, and Triton would say so in an error of its compiler.
    """
    dtypes = {operand.dtype for operand in operands.values()}
    if len(dtypes) > 1 or not dtypes <= _DTYPES:
        found = ", ".join(f"{name} {operand.dtype}" for name, operand in operands.items())
        raise TypeError(f"{found}; expected one of float32, bfloat16, float16 for all of them")
