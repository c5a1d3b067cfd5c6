"""Ranks and best tokens with exact ties, where `topk` promises nothing."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.engine.logprobs import best_tokens, ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 3, (50, 40), generator=generator).to(dtype)
    counts = [row % 9 for row in range(49)] + [-1]
    best = best_tokens(logits, counts)
    for row, count, found in zip(logits.tolist(), counts, best, strict=True):
        order = sorted(range(40), key=lambda i: (-row[i], i))
        assert found == order[: count if count >= 0 else None]
        ids = torch.arange(40)
        places = ranks(torch.tensor([row] * 40, dtype=dtype), ids)
        assert [order[place - 1] for place in places] == list(range(40))


def test_more_than_the_vocabulary_is_the_whole_of_it() -> None:
    assert best_tokens(torch.tensor([[1.0, 3.0, 2.0]]), [7]) == [[1, 2, 0]]
