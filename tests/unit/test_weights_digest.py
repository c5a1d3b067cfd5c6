"""The weights digest over real files: independent of sharding, sensitive to every byte, cached by file identity."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.errors import CheckpointError
from tokenspeed.numerics import weights
from tokenspeed.numerics.weights import digest_files, tensor_digest

TENSORS = {
    "b.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "a.weight": torch.arange(5, dtype=torch.float32),
    "c": torch.zeros(0, 3),
}


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once."""
    monkeypatch.setattr(weights, "SETTLED_SECONDS", -1.0)


def save(path: Path, names: str | None = None, **metadata: str) -> Path:
    chosen = TENSORS if names is None else {name: TENSORS[name] for name in names.split()}
    save_file(chosen, path, metadata=metadata or None)
    return path


def test_sharding_and_metadata_do_not_matter(tmp_path: Path) -> None:
    whole = digest_files([save(tmp_path / "all.safetensors", format="pt")], cache=None)
    parts = [save(tmp_path / "1.safetensors", "a.weight c"), save(tmp_path / "2.safetensors", "b.weight", made="by me")]
    assert digest_files(parts, cache=None).hex == whole.hex
    assert digest_files(reversed(parts), cache=None).hex == whole.hex
    assert whole.tensors["b.weight"].sha256 == tensor_digest(TENSORS["b.weight"])


def test_every_byte_counts(tmp_path: Path) -> None:
    path = save(tmp_path / "w.safetensors")
    before = digest_files([path], cache=None)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert digest_files([path], cache=None).hex != before.hex


def test_the_cache_is_used_for_the_same_file_only(tmp_path: Path, settled: None, monkeypatch: Any) -> None:
    path, cache = save(tmp_path / "w.safetensors"), tmp_path / "cache"
    first = digest_files([path], cache=cache)
    hashed: list[Path] = []
    original = weights._hash_file
    monkeypatch.setattr(weights, "_hash_file", lambda path, progress: hashed.append(path) or original(path, progress))
    assert digest_files([path], cache=cache).hex == first.hex
    assert hashed == []
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    status = path.stat()
    path.write_bytes(data)
    # The same size, inode and modification time: the change time still tells.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest_files([path], cache=cache).hex != first.hex
    assert hashed == [path]


def test_a_new_file_is_not_cached_yet(tmp_path: Path) -> None:
    digest_files([save(tmp_path / "w.safetensors")], cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_broken_cache_is_read_past(tmp_path: Path, settled: None) -> None:
    path, cache = save(tmp_path / "w.safetensors"), tmp_path / "cache"
    first = digest_files([path], cache=cache)
    (stored,) = cache.iterdir()
    for junk in (b"{", b"[]", b'{"identity": 1}'):
        stored.write_bytes(junk)
        assert digest_files([path], cache=cache).hex == first.hex


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, settled: None) -> None:
    (tmp_path / "file").write_text("")
    assert digest_files([save(tmp_path / "w.safetensors")], cache=tmp_path / "file" / "cache").hex


@pytest.mark.parametrize("content", [b"", b"\xff" * 8 + b"{}", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_malformed_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        digest_files([path], cache=None)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "w.safetensors")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="ends inside tensor"):
        digest_files([path], cache=None)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = save(tmp_path / "w.safetensors")
    original = weights._hash_file

    def racing(path: Path, progress: Any) -> Any:
        found = original(path, progress)
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(1, 1))
        return found

    monkeypatch.setattr(weights, "_hash_file", racing)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        digest_files([path], cache=None)
