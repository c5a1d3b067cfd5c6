"""A prompt computed whole = in chunks, wherever the cuts are and whoever moves them."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.verify.items import Item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Script, Setup, Start, together


@pytest.mark.parametrize("chunk", [1, 2, 3, 15, 16, 17, 64, 100, 255])
def test_chunks_of(chunk: int, lab: Lab, item_of: Any, same: Any) -> None:
    chosen = [item_of(lab, length, length, 5, temperature=length % 2) for length in (33, 64, 129, 300)]
    run = same(lab, together(chosen, max_chunk=chunk, prefix_caching=False))
    assert run.evidence["chunked prefills"] >= 300 // chunk


@pytest.mark.parametrize("budget", [16, 37, 64, 100])
def test_neighbours_move_the_cut(budget: int, lab: Lab, items: list[Item], same: Any) -> None:
    starts = tuple(Start(item, at=2 * i) for i, item in enumerate(items))
    run = same(lab, Script(starts, Setup(budget=budget, max_seqs=8, prefix_caching=False)))
    assert run.evidence["chunked prefills"] > 0
    assert run.evidence["steps of decode and prefill"] > 0
