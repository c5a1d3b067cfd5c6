"""Where arguments lie and what fresh memory holds: the circumstances that a kernel must not notice."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

Layout = Literal["plain", "offset", "strided"]
"""`offset` begins one element after an aligned address; `strided` leaves a gap after each row and begins there too."""

Fresh = Literal["as it comes", "nan", "large"]
"""What uninitialised memory holds: NaN (torch fills its own allocations), or bytes 0x7f (malloc does, with glibc)."""

GAP = 5
"""Elements between the rows of a strided argument: odd, so that rows are aligned differently."""

_GUARD = 64
_M_PERTURB = -6
_PERTURB_BYTE = 0x80  # glibc fills with the complement: 0x7f7f7f7f is 3.4e38 as fp32, and 3.4e38 as bf16 too


@dataclass(frozen=True)
class Placed:
    """A tensor as a view into a larger buffer, and what the buffer held before the call."""

    view: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor

    def untouched(self) -> bool:
        """Whether every byte of the buffer is what it was, inside the view and around it."""
        return torch.equal(as_bytes(self.buffer), self.before)


def place(tensor: torch.Tensor, layout: Layout) -> Placed:
    """A copy of `tensor` in the wanted layout, with guards before and behind and between its rows.

    The last axis keeps unit stride, as the operators promise; a vector can only be offset.
    """
    start = _GUARD if layout == "plain" else _GUARD + 1
    row = tensor[0].numel() if tensor.dim() > 1 and len(tensor) else tensor.shape[1:].numel() if tensor.dim() > 1 else 1
    gap = GAP if layout == "strided" and tensor.dim() > 1 else 0
    rows = len(tensor) if tensor.dim() else 1
    buffer = torch.empty(start + rows * (row + gap) + _GUARD, dtype=tensor.dtype, device=tensor.device)
    as_bytes(buffer).fill_(0x7F)
    inner = [tensor.shape[axis + 1 :].numel() for axis in range(1, tensor.dim())]
    view = buffer.as_strided(tensor.shape, (row + gap, *inner) if tensor.dim() else (), start)
    view.copy_(tensor)
    return Placed(view, buffer, as_bytes(buffer).clone())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as uint8, which compare as bits: NaN equals the same NaN, and -0.0 differs from 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and equal bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


@contextmanager
def circumstances(*, threads: int | None = None, fresh: Fresh = "as it comes") -> Iterator[None]:
    """Run with so many torch threads (None: as it is) and with fresh memory of that content; undone afterwards."""
    had_threads = torch.get_num_threads()
    had = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        if fresh == "nan":
            # In this mode torch fills whatever it allocates, and does not otherwise initialise, with NaN.
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = True
        elif fresh == "large":
            _perturb(_PERTURB_BYTE)
        yield
    finally:
        if fresh == "large":
            _perturb(0)
        if fresh == "nan":
            torch.use_deterministic_algorithms(had[0], warn_only=had[1])
            memory.fill_uninitialized_memory = filled
        if threads is not None:
            torch.set_num_threads(had_threads)


def _perturb(byte: int) -> None:
    """Let glibc fill what malloc returns; elsewhere nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_PERTURB, byte)
