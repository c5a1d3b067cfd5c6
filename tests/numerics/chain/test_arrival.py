"""A request alone = the same request among others, in whatever order they arrive and get seats."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tokenspeed.verify.items import Item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Script, Setup, Start, together


def test_reversed(lab: Lab, items: list[Item], same: Any) -> None:
    assert same(lab, together(reversed(items))).evidence["shared steps"] > 0


@pytest.mark.parametrize("gap", [1, 2, 5])
def test_one_after_another(gap: int, lab: Lab, items: list[Item], same: Any) -> None:
    run = same(lab, Script(tuple(Start(item, at=gap * i) for i, item in enumerate(items))))
    assert run.evidence["steps of decode and prefill"] > 0


@pytest.mark.parametrize("seats", [1, 3, 16])
def test_shuffled_with_few_seats(seats: int, lab: Lab, items: list[Item], same: Any) -> None:
    source = random.Random(seats)
    starts = tuple(Start(item, at=source.randrange(20)) for item in source.sample(items, len(items)))
    run = same(lab, Script(starts, Setup(max_seqs=seats)))
    assert max(run.batch_sizes) <= seats
