"""A request alone = the same request in a batch, whatever the size of the batch or of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed.verify.items import Item, float_bits
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import together


@pytest.mark.parametrize("size", [2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128])
def test_batch_of(size: int, lab: Lab, item_of: Any, same: Any) -> None:
    distinct = [item_of(lab, 1 + 5 * i % 37, i, 4, temperature=i % 3 / 2) for i in range(12)]
    run = same(lab, together([distinct[i % 12] for i in range(size)], prefix_caching=False))
    assert max(run.batch_sizes) == size


def test_large_step(lab: Lab, items: list[Item], same: Any) -> None:
    run = same(lab, together(items))
    assert run.evidence["steps above 256 tokens"] > 0


def test_one_length_48_times_over_and_over(lab: Lab, item_of: Any, same: Any) -> None:
    prompts = [item_of(lab, 40, i, 3) for i in range(48)]
    for _ in range(2):
        assert 48 in same(lab, together(prompts)).batch_sizes


def test_the_comparison_sees_one_bit(lab: Lab, item_of: Any, same: Any) -> None:
    """The last bit of a logprob, another token, another seed."""
    item = item_of(lab, 9, 1)
    value = torch.tensor(-1.25)
    assert float_bits(value.item()) != float_bits(torch.nextafter(value, torch.tensor(0.0)).item())
    with pytest.raises(AssertionError):
        same.replies([lab.alone(item)], [lab.alone(item.but("other seed", seed=2))])
