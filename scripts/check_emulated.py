"""Every native kernel, built for another processor and run by an emulator, gives the bits that it gives here.

    python scripts/check_emulated.py BUILD_FOLDER        (nox -s neon)

The inputs are those of the check at start. Each call is recorded with the memory that it may touch, before and after;
`emulated_runner.cpp`, cross-compiled beside the library in BUILD_FOLDER, repeats it there and compares all of it.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from rich.progress import track

from tokenspeed_kernels_aok.cpu import selfcheck
from tokenspeed_kernels_aok.cpu.library import KernelCall, Library

MODULES = ("attention", "embedding", "gemm", "mla", "moe", "rows", "sampling", "sparse")
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


class Recorder:
    """Stands for a kernel: runs it, and writes the call and its memory to a file."""

    def __init__(self, name: str, call: KernelCall, file: BinaryIO) -> None:
        self._name, self._call, self._file = name, call, file

    def __call__(self, block: bytes) -> None:
        words = memoryview(block).cast("q")
        buffers = {storage.data_ptr(): storage for storage in _storages() if storage.nbytes()}
        used: dict[int, int] = {}
        places = []
        for place, word in enumerate(words):
            for start, storage in buffers.items():
                if start <= word < start + storage.nbytes():
                    places += [place, used.setdefault(start, len(used)), word - start]
                    break
        before = [bytes(buffers[start]) for start in used]
        self._call(block)
        after = [bytes(buffers[start]) for start in used]
        self._write(self._name.encode(), bytes(block), _int64(places), *before, *after)

    def _write(self, *parts: bytes) -> None:
        self._file.write(_int64([len(parts)]))
        for part in parts:
            self._file.write(_int64([len(part)]) + part)


def _storages() -> Iterator[torch.UntypedStorage]:
    for item in gc.get_objects():
        if type(item) is torch.Tensor and item.device.type == "cpu":
            yield item.untyped_storage()


def _int64(values: list[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


def record(path: Path) -> list[str]:
    """Write every call of every check at start to `path`. Returns the kernels' names."""
    checks = []

    def collect(lib: Library, name: str, check: selfcheck.Check, call: KernelCall, portable: KernelCall) -> None:
        del lib, call
        checks.append((name, check, portable))

    setattr(selfcheck, "verify", collect)  # noqa: B010 - every module hands its check to this function
    for module in MODULES:
        importlib.import_module(f"tokenspeed_kernels_aok.cpu.{module}")
    with path.open("wb") as file:
        for name, check, portable in track(checks, "recording"):
            check(Recorder(name, portable, file))
    return [name for name, _, _ in checks]


def main() -> int:
    folder = Path(sys.argv[1])
    names = record(folder / "calls.bin")
    result = replay(folder, folder / "calls.bin")
    print(result.stdout, end="")
    untried = [name for name in names if f" {name}:" not in result.stdout]
    if untried:
        print("not tried:", ", ".join(untried))
    # A comparison that cannot fail shows nothing: one flipped bit in the last buffer has to be found.
    altered = bytearray((folder / "calls.bin").read_bytes())
    altered[-1] ^= 1
    (folder / "altered.bin").write_bytes(altered)
    missed = replay(folder, folder / "altered.bin").returncode != 1
    if missed:
        print("a flipped bit was not found")
    return result.returncode or len(untried) or int(missed)


def replay(folder: Path, calls: Path) -> subprocess.CompletedProcess[str]:
    """What the runner in `folder` says of recorded calls; status 1 when a byte differs."""
    runner = [*EMULATOR, str(folder / "emulated_runner"), str(folder / "libtokenspeed_aok.so"), str(calls)]
    return subprocess.run(runner, stdout=subprocess.PIPE, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
