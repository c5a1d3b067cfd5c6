"""What the cases share: the device, made-up tensors, and comparison by bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tokenspeed.kernels.operators import OPERATORS
from tokenspeed_kernels_aok.triton.launch import INTERPRETED, arch_of

EMULATED = os.environ.get("TRITON_CASES_EMULATE", "")
"""The architecture of the emulated GPU that kernels run on, as `sm90`; empty without one."""

DEVICE = torch.device("cpu" if INTERPRETED or EMULATED or not torch.cuda.is_available() else "cuda")

THOROUGH = DEVICE.type == "cuda" or "TRITON_CASES_THOROUGH" in os.environ
"""Whether to take the larger of two sizes: on a GPU, and in the nox sessions, which have the time."""

MODEL_SIZED = THOROUGH or bool(EMULATED)
"""Whether to try the widths of real models too, each of which is another layout in compiled code."""

SIZES = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128)
"""Batch sizes at which engines are known to change kernels, tiles or splits."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same ones for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def architectures(table: dict[str, object]) -> list[str]:
    """Tables that can run here, equal ones once: all of them in the interpreter, a GPU's own on it."""
    if not INTERPRETED:
        return [arch_of(DEVICE)] if EMULATED or DEVICE.type == "cuda" else []
    return list({id(entry): name for name, entry in reversed(table.items())}.values())


@contextmanager
def dirty_memory() -> Iterator[None]:
    """Whatever torch allocates, and does not otherwise initialise, holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shapes, dtypes and every bit agree."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same_form = a.shape == b.shape and a.dtype == b.dtype
    return same_form and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def float_bits(a: torch.Tensor | np.ndarray) -> np.ndarray:
    """fp32 values as int32, for comparison with an oracle."""
    array = a.cpu().numpy() if isinstance(a, torch.Tensor) else a
    return np.ascontiguousarray(array, dtype=np.float32).view(np.int32)


def assert_agrees(operator: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The operator's stated agreement with the reference, relative to the largest expected value."""
    limit = dict(OPERATORS[operator].agreement)[str(actual.dtype).removeprefix("torch.")]
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    assert error <= limit, f"{operator}: relative error {error:.2e}, the limit is {limit:.2e}"


def assert_rows_do_not_depend_on_the_batch(run: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    """`run` on the first n rows, for every size n below their number, and on a middle part gives the same bits."""
    assert len(rows) in SIZES[5:]
    whole = run(rows)
    for size in SIZES[: SIZES.index(len(rows))]:
        assert same_bits(run(rows[:size]), whole[:size]), f"the first {size} rows depend on the batch"
    assert same_bits(run(rows[5:14]), whole[5:14]), "rows 5 to 13 depend on their place"
