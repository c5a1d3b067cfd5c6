"""Memory on large pages: like any other, but zero without being zeroed, and given back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tokenspeed import huge_pages


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (1024, 1024), (5, 3, 700, 1001)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64])
def test_zeros_are_like_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = huge_pages.zeros(*shape, dtype=dtype)
    assert torch.equal(tensor, torch.zeros(shape, dtype=dtype))
    assert tensor.is_contiguous()
    assert tensor.dtype == dtype
    assert tensor.data_ptr() % 64 == 0


def test_no_two_share_a_byte() -> None:
    tensors = [huge_pages.zeros(300_001, dtype=torch.uint8) for _ in range(5)]
    for value, tensor in enumerate(tensors, start=1):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [2], [3], [4], [5]]


def test_a_copy_equals_what_it_copies() -> None:
    tensor = torch.arange(600_000).view(2, 300_000).t()
    copy = huge_pages.copied(tensor)
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous()


def test_memory_goes_back_with_the_last_tensor() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    tensor = huge_pages.zeros(256 << 20, dtype=torch.uint8)
    assert resident() - before < 64 << 20  # nothing was touched yet
    tensor.fill_(1)
    assert resident() - before > 192 << 20
    del tensor
    gc.collect()
    assert resident() - before < 64 << 20
