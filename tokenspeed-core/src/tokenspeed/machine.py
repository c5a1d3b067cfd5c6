"""What this computer is, read once and passed on; a made-up `Machine` lets a laptop plan for an H200.

Knows nothing of kernels or models. Reading the machine imports no plugin, and no torch unless the device may be a GPU:
only torch knows whether there is one. Which device `auto` means is decided here and nowhere else.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenspeed import cgroup
from tokenspeed.errors import ConfigError

# Linux spells the flags of /proc/cpuinfo this way; the values are the names that kernels require.
_CPU_FLAGS = {"avx2": "avx2", "fma": "fma", "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512_bf16": "avx512_bf16"}
_CPU_FLAGS |= {"amx_bf16": "amx_bf16", "asimd": "neon", "bf16": "neon_bf16"}

DEVICES = ("cpu", "cuda")
ARCHITECTURES = frozenset({"x86_64", "aarch64", "arm64", "ppc64le", "riscv64", "s390x"})
"""Of CPUs, as the system spells them. A GPU's is `sm` and its compute capability: `sm90`."""

INSTRUCTION_SETS = frozenset(_CPU_FLAGS.values())
LIBRARIES = ("torch", "triton", "flashinfer", "numpy")
"""Modules whose versions are looked up."""

_DISTRIBUTION_OF = {"flashinfer": "flashinfer-python"}


_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Where a driver shows itself (NVIDIA, WSL 2, AMD); without any of them torch need not be asked, nor imported."""


@dataclass(frozen=True)
class Machine:
    """One computer, as far as kernel selection cares.

    `device` is `cpu` or `cuda`; `arch` is `x86_64`, `aarch64` or `sm80`, `sm90`, …; `isa` the CPU instruction sets;
    `cores` the CPUs and `memory_bytes` the host's memory that this process may use; `libraries` maps module to version.
    `gpu_memory_bytes` is the whole memory of the GPU and `gpu_free_bytes` what of it this process could have; 0
    without one.
    """

    device: str = "cpu"
    arch: str = "x86_64"
    isa: frozenset[str] = frozenset()
    name: str = ""
    cores: int = 1
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    gpu_free_bytes: int = 0
    libraries: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def describe(self) -> str:
        """`cpu x86_64 (avx2, avx512f), 2 cores`."""
        isa = f" ({', '.join(sorted(self.isa))})" if self.isa else ""
        return f"{self.device} {self.arch}{isa}, {self.cores} core{'s' if self.cores != 1 else ''}"


def installed_libraries() -> Mapping[str, str]:
    """Versions of the libraries that kernels may require, without importing any of them."""
    found = {}
    for module in LIBRARIES:
        try:
            found[module] = importlib.metadata.version(_DISTRIBUTION_OF.get(module, module))
        except importlib.metadata.PackageNotFoundError:
            continue
    return MappingProxyType(found)


def choose_device(device: str) -> str:
    """`cpu` or `cuda` for `auto`, which takes a GPU if torch sees one; another name as it is."""
    if device != "auto":
        return device
    if not any(map(os.path.exists, _GPU_NODES)):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def read_machine(device: str = "cpu") -> Machine:
    """Read this computer, on its GPU where `auto` finds one: the current one, or with `cuda:1` the one of that number.

    Raises ConfigError when there is none for `cuda`.
    """
    device, _, number = choose_device(device).partition(":")
    index = int(number) if number else None
    flags, name = _cpu_flags()
    common: dict[str, Any] = {
        "isa": flags,
        "cores": _cores(),
        "memory_bytes": _memory_bytes(),
        "libraries": installed_libraries(),
    }
    if device == "cpu":
        return Machine(device="cpu", arch=platform.machine(), name=name, **common)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(f"--device cuda: {_why_no_gpu(torch)}; use --device cpu")
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        # What torch keeps for this process and no tensor holds, as after another engine, is free to the next one.
        free += torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        return Machine(
            device="cuda",
            arch=f"sm{major}{minor}",
            name=torch.cuda.get_device_name(index),
            gpu_memory_bytes=total,
            gpu_free_bytes=free,
            **common,
        )
    raise ConfigError(f"--device: {device!r} is not one of cpu, cuda")


def gpu_used_with() -> str:
    """torch's precision of fp32 products where this process has used a GPU, as a trainer beside it has; else empty."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # set by two of torch's ways, of which one does not know the other
        return "mixed"


def _why_no_gpu(torch: Any) -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install one with it"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides every GPU"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU and driver that it can use here"


def named_machine(text: str) -> Machine:
    """A made-up machine from a short name: `sm90`, `sm80`, `cpu`, `cpu-avx2`, `cpu-avx512f`, `cpu-avx512_bf16`.

    The libraries are taken to be those installed here plus triton for GPUs, since a plan is about what could run.
    """
    libraries = dict(installed_libraries())
    levels = ("avx2", "avx512f", "avx512_bf16")
    if text.startswith("sm") and text[2:].isdigit():
        return Machine("cuda", text, name=text, libraries=MappingProxyType(libraries | {"triton": "any"}))
    if text == "cpu":
        return Machine("cpu", "x86_64", name=text, libraries=MappingProxyType(libraries))
    if text.startswith("cpu-") and text[4:] in levels:
        isa = frozenset({"fma", "avx512bw"} if text != "cpu-avx2" else {"fma"})
        isa |= frozenset(levels[: levels.index(text[4:]) + 1])
        return Machine("cpu", "x86_64", isa, name=text, libraries=MappingProxyType(libraries))
    raise ConfigError(f"--machine: {text!r} is not one of cpu, {', '.join('cpu-' + x for x in levels)}, smNN")


def _cpu_flags() -> tuple[frozenset[str], str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset(), platform.processor()
    flags: frozenset[str] = frozenset()
    name = platform.processor()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = frozenset(_CPU_FLAGS[flag] for flag in value.split() if flag in _CPU_FLAGS)
        elif key.strip() == "model name":
            name = value.strip()
        elif not line.strip():
            break
    return flags, name


def _cores() -> int:
    """CPUs that this process may run on, or fewer where its container has time on fewer; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup.cpu_limit()
    return cores if limit is None else max(min(cores, math.floor(limit)), 1)


def _memory_bytes() -> int:
    """The machine's memory, or what this process's container has of it; 0 where nothing says."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory = 0
    limit = cgroup.memory_limit()
    return memory if limit is None else min(memory or limit, limit)
