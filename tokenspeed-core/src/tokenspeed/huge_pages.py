"""Memory on the system's large pages, for what is read from memory again and again: packed weights and the KV cache.

A decode step reads every weight once. With pages of 4 KiB the walks through the page tables can halve that rate, above
all in a virtual machine, where each walk is two-dimensional. Linux hands out pages of 2 MiB to whoever asks for them
(`madvise`; /sys/kernel/mm/transparent_hugepage/enabled must not say `never`). Elsewhere this is ordinary memory.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

_CHUNK_BYTES = 64 << 20
"""Small tensors share a mapping of so many bytes: a mapping for each would leave its ragged end on small pages."""

_PAGE_BYTES = 2 << 20
_LEAST_BYTES = 256 << 10
_ALIGNMENT = 128


class _Chunks:
    """Cuts tensors from mappings, never the same bytes twice; a mapping goes when the last tensor in it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """A mapping and the offset in it from which `num_bytes` bytes are the caller's."""
        if num_bytes >= _CHUNK_BYTES:
            return _mapping(num_bytes), 0
        with self._lock:
            if self._chunk is None or self._used + num_bytes > _CHUNK_BYTES:
                self._chunk, self._used = _mapping(_CHUNK_BYTES), 0
            offset = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return self._chunk, offset


_chunks = _Chunks()


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of zeros, contiguous. Nothing is touched before its first use, so nothing is spent on zeroing it.

    Raises MemoryError when the system refuses the address space.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    chunk, offset = _chunks.take(num_bytes)
    return torch.frombuffer(chunk, dtype=dtype, count=num_bytes // dtype.itemsize, offset=offset).view(shape)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a CPU tensor."""
    return zeros(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _mapping(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no address space for {num_bytes / 2**20:.0f} MiB: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a kernel without large pages: the same memory on small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
