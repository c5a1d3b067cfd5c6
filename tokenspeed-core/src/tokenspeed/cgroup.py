"""What a container may use: the CPU time and the memory that Linux control groups (versions 1 and 2) leave a process.

The CPUs that a process may run on and the memory of the machine say nothing of them. Sources: the kernel's
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, Documentation/scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60
"""Version 1 writes no limit as a number near 2^63."""


def cpu_limit(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time, as 2.5; None without a limit. `root` is where /proc and /sys are."""
    limits = []
    for folder in _groups("cpu", root):
        words = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes; None without a limit. `root` is where /proc and /sys are."""
    names = ("memory.max", "memory.limit_in_bytes")
    words = [word for folder in _groups("memory", root) for name in names for word in _words(folder / name)]
    limits = [int(word) for word in words if word.isdigit() and int(word) < _UNLIMITED]
    return min(limits, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's groups for `controller`, and of those above, which limit it too."""
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mounts / controllers if controllers else mounts
        # Inside of a container the path may be the host's, and its own group is then the mounted one.
        inner = PurePosixPath(path.lstrip("/"))
        yield from (base / part for part in (inner, *inner.parents))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()
