"""A digest of a checkpoint's weights that does not depend on how they are cut into files.

Every tensor has a SHA-256 of its bytes as stored; the digest is the SHA-256 of the table of all tensors (name, dtype,
shape, hash), sorted by name. A table can therefore be brought up to date tensor by tensor when weights change. Files
are read in pieces, once; the result is kept in the user's cache under each file's identity (path, size, inode, times),
so that a second start reads nothing. Knows safetensors' layout; imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from tokenspeed.errors import CheckpointError
from tokenspeed.numerics.canonical import canonical_json

if TYPE_CHECKING:
    import torch

READ_BYTES = 4 << 20

SETTLED_SECONDS = 2.0
"""A file younger than this is not cached: it could change again within the resolution of its timestamps."""

Progress = Callable[[int, int], None]
"""Called with (bytes hashed, bytes in all)."""


@dataclass(frozen=True)
class TensorDigest:
    """One tensor: `dtype` by its safetensors name, `sha256` (hex) of its bytes as stored, little-endian, row-major."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class WeightsDigest:
    """The tensors of one set of weights. Equal `hex`, equal weights."""

    tensors: Mapping[str, TensorDigest]

    @cached_property
    def hex(self) -> str:
        """SHA-256 of the canonical table."""
        table = [[name, t.dtype, list(t.shape), t.sha256] for name, t in sorted(self.tensors.items())]
        return hashlib.sha256(canonical_json(table)).hexdigest()

    def only(self, names: Iterable[str]) -> WeightsDigest:
        """The digest of these tensors alone. Raises KeyError for one that is not there."""
        return WeightsDigest(MappingProxyType({name: self.tensors[name] for name in names}))

    def updated(self, changes: Mapping[str, TensorDigest]) -> WeightsDigest:
        """The digest after these tensors were replaced."""
        return WeightsDigest(MappingProxyType({**self.tensors, **changes}))


def digest_files(files: Iterable[Path], *, cache: Path | None, progress: Progress | None = None) -> WeightsDigest:
    """Hash every tensor of these safetensors files; `cache` is the folder of earlier results, None to read everything.

    Raises CheckpointError when a file is malformed, or changes while it is read.
    """
    listed = sorted(files)
    total = sum(path.stat().st_size for path in listed)
    done = 0
    tensors: dict[str, TensorDigest] = {}
    for path in listed:
        found = _cached(path, cache) if cache is not None else None
        if found is None:
            before = _identity(path)
            found = _hash_file(path, lambda count, base=done: progress and progress(base + count, total))  # type: ignore[misc]
            if _identity(path) != before:
                raise CheckpointError(f"{path} changed while it was read; start again when it is complete")
            if cache is not None:
                _store(path, before, found, cache)
        tensors |= found
        done += path.stat().st_size
        if progress:
            progress(done, total)
    return WeightsDigest(MappingProxyType(tensors))


def version_of(digest: str) -> str:
    """A version for weights that were given none: the beginning of their digest; equal weights have equal versions."""
    return digest[:12]


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of a tensor's values in row-major order."""
    import torch

    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def default_cache() -> Path:
    """`tokenspeed/weights` in the user's cache folder (`XDG_CACHE_HOME`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenspeed" / "weights"


def _hash_file(path: Path, progress: Callable[[int], object]) -> dict[str, TensorDigest]:
    found: dict[str, TensorDigest] = {}
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        header, start = _header(path, file)
        # In the order of the file, so that it is read from front to back.
        for name, record in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            first, last = record["data_offsets"]
            file.seek(start + first)
            digest = hashlib.sha256()
            left = last - first
            while left:
                count = file.readinto(buffer[: min(left, READ_BYTES)])
                if not count:
                    raise CheckpointError(f"{path} ends inside tensor {name}")
                digest.update(buffer[:count])
                left -= count
                progress(start + last - left)
            found[name] = TensorDigest(record["dtype"], tuple(record["shape"]), digest.hexdigest())
    return found


def _header(path: Path, file: BinaryIO | Any) -> tuple[dict[str, Any], int]:
    """The records of a safetensors file by tensor, and where the data begins."""
    size = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return header, 8 + size
    except (ValueError, TypeError, AttributeError, MemoryError, OverflowError) as error:
        raise CheckpointError(f"{path} is no readable safetensors file: {error}") from error


def _identity(path: Path) -> list[int | str]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _cache_file(path: Path, cache: Path) -> Path:
    return cache / (hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32] + ".json")


def _cached(path: Path, cache: Path) -> dict[str, TensorDigest] | None:
    """An earlier result for exactly this file, or None."""
    try:
        stored = json.loads(_cache_file(path, cache).read_bytes())
        if stored["identity"] != _identity(path):
            return None
        return {name: TensorDigest(dtype, tuple(shape), sha) for name, (dtype, shape, sha) in stored["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(path: Path, identity: list[int | str], found: Mapping[str, TensorDigest], cache: Path) -> None:
    """Keep a result. A folder that cannot be written only costs the next start some time."""
    status = path.stat()
    if time.time() - max(status.st_mtime, status.st_ctime) < SETTLED_SECONDS:
        return
    tensors = {name: [t.dtype, list(t.shape), t.sha256] for name, t in found.items()}
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".tmp", delete=False) as file:
            file.write(canonical_json({"identity": identity, "tensors": tensors}))
        os.replace(file.name, _cache_file(path, cache))
