"""What the tests of the aok CPU kernels share: the variants of this machine, bits, and awkward inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
import torch

from oracle import ieee
from tokenspeed_kernels_aok.cpu.library import library

VARIANTS = library().supported_variants()
FAST_VARIANTS = tuple(name for name in VARIANTS if name != "portable")
DTYPES = (torch.bfloat16, torch.float32)
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 257)


def use_variant(monkeypatch: pytest.MonkeyPatch, variant: str, module: ModuleType, **kernels: str) -> None:
    """Let `module` call `variant`: `kernels` maps a module attribute (`_gemm`) to the name of its argument block."""
    for attribute, block in kernels.items():
        call = library().kernel(attribute.removeprefix("_"), getattr(module, block), variant)
        monkeypatch.setattr(module, attribute, call)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a float tensor as integers, so that NaN equals itself and -0 differs from +0."""
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two float tensors hold the same bits."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def wide(x: torch.Tensor) -> ieee.F32:
    """A tensor as an fp32 NumPy array, bit for bit (torch's own widening keeps denormals)."""
    return x.to(torch.float32).numpy()


def narrowed(x: ieee.F32, dtype: torch.dtype) -> torch.Tensor:
    """An fp32 array of the oracle as a tensor of `dtype`, by the oracle's rounding."""
    if dtype == torch.float32:
        return torch.from_numpy(np.ascontiguousarray(ieee.canonical(x)))
    return torch.from_numpy(ieee.to_bf16(x).view(np.int16)).view(torch.bfloat16)


def awkward(kind: str, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random values of one kind: `normal`, `denormal`, `huge`, `cancelling`, `zeros`, `special`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    pick = torch.rand(*shape, generator=generator)
    if kind == "denormal":  # products around the smallest normal number, and denormal inputs
        x = x * torch.exp2(torch.randint(-72, -58, shape, generator=generator).float())
        x = torch.where(pick < 0.1, torch.tensor(1e-39), x)
    elif kind == "huge":  # sums overflow now and then
        x = x * torch.exp2(torch.randint(40, 65, shape, generator=generator).float())
    elif kind == "cancelling":
        x = torch.where(pick < 0.5, x.sign() * 1024.0, x)
    elif kind == "zeros":
        x = torch.where(pick < 0.7, torch.where(pick < 0.35, 0.0, -0.0), x)
    elif kind == "special":
        x = torch.where(pick < 0.01, torch.tensor(torch.inf), x)
        x = torch.where(pick > 0.99, torch.tensor(torch.nan), x)
    return x.to(dtype)


KINDS = ("normal", "denormal", "huge", "cancelling", "zeros", "special")
