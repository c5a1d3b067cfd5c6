"""One safetensors file, read and never mapped.

A trainer may cut a file short, or write over it, while an engine reads it. Under a memory map that ends the process
(SIGBUS), or gives a tensor that is half old and half new. Here both are a `CheckpointError`: from the reading of its
header to that of its last tensor, a file must stay the same one, and untouched.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from tokenspeed.errors import CheckpointError

WEIGHT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Stored dtypes that can be read, by their name in a safetensors header."""

STORED_DTYPES = WEIGHT_DTYPES | {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""The same with the dtypes of weight formats, which are read as they are and never converted."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library has it."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file describes it: `dtype` by its safetensors name, `offset` from the beginning of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes on disk of a readable dtype."""
        return torch.Size(self.shape).numel() * STORED_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class WeightFile:
    """What a file's header says. `identity` is the file's and changes when it is written to or replaced."""

    path: Path
    identity: tuple[int, ...]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def examine(cls, path: Path) -> WeightFile:
        """Read and check the header. Raises CheckpointError."""
        with _opened(path) as (file, identity):
            return cls(path, identity, _header(path, file, identity[0]))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors; each is valid until the next one is asked for.

        Raises CheckpointError, at the latest after the last one, when the file is not what `examine` saw.
        """
        wanted = {name: self.tensors[name] for name in names}
        buffer = torch.empty(max((t.num_bytes for t in wanted.values()), default=0), dtype=torch.uint8)
        with _opened(self.path) as (file, identity):
            self._check(identity)
            for name, stored in wanted.items():
                piece = buffer[: stored.num_bytes]
                self._fill(piece.numpy().data, file, stored.offset)
                yield name, piece.view(STORED_DTYPES[stored.dtype]).view(stored.shape)
            self._check(_identity(file))

    def check_unchanged(self) -> None:
        """Raises CheckpointError when the file is not the one that `examine` saw."""
        with _opened(self.path) as (_, identity):
            self._check(identity)

    def _fill(self, view: memoryview, file: int, offset: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], offset + done)
            if not count:
                self._check(_identity(file))
                raise CheckpointError(f"{self.path} ends within a tensor")
            done += count

    def _check(self, identity: tuple[int, ...]) -> None:
        if identity != self.identity:
            raise CheckpointError(
                f"{self.path} changed while it was read; write new weights into another folder, or under another name "
                "and rename them when they are complete"
            )


class _Record(msgspec.Struct):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def _header(path: Path, file: int, size: int) -> dict[str, StoredTensor]:
    length = int.from_bytes(os.pread(file, _LENGTH_BYTES, 0), "little")
    start = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or start > size:
        raise _unreadable(path, f"its header would be {length} bytes long, the file has {size}")
    try:
        raw = msgspec.json.decode(os.pread(file, length, _LENGTH_BYTES), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        records = {name: msgspec.json.decode(record, type=_Record) for name, record in raw.items()}
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise _unreadable(path, str(error)) from error
    end = 0
    for name, record in sorted(records.items(), key=lambda item: item[1].data_offsets):
        first, last = record.data_offsets
        dtype = STORED_DTYPES.get(record.dtype)
        if first != end or last < first:
            raise _unreadable(path, f"{name} begins at byte {first}, the one before it ends at {end}")
        if dtype is not None and last - first != torch.Size(record.shape).numel() * dtype.itemsize:
            raise _unreadable(path, f"{name} is {record.dtype} {list(record.shape)} in {last - first} bytes")
        end = last
    if start + end != size:
        raise _unreadable(path, f"its tensors end at byte {start + end}, the file at {size}")
    return {
        name: StoredTensor(path, record.shape, record.dtype, start + record.data_offsets[0])
        for name, record in records.items()
    }


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The descriptor of a regular file, and its identity. Raises CheckpointError, for what happens inside, too."""
    try:
        # A pipe of this name would otherwise wait for its writer, and everybody for the pipe.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise _unreadable(path, "no regular file")
            yield file, _identity(file)
        finally:
            os.close(file)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _identity(file: int) -> tuple[int, ...]:
    status = os.fstat(file)
    return status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is no readable safetensors file (truncated or corrupt?): {why}")
