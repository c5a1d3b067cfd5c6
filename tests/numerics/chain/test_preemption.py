"""A request that ran through = one that lost its pages and was recomputed, its generated tokens included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tokenspeed.verify.items import Item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Preempt, together


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("at", [1, 2, 9])
def test_forced(at: int, caching: bool, lab: Lab, items: list[Item], same: Any) -> None:
    script = replace(together(items[:6], prefix_caching=caching), preempts=(Preempt(0, at), Preempt(3, at + 2)))
    run = same(lab, script)
    assert run.evidence["preemptions"] >= 6
    assert max(outcome.preemptions for outcome in run.outcomes) == 2


@pytest.mark.parametrize("caching", [True, False])
def test_for_want_of_pages(caching: bool, lab: Lab, item_of: Any, same: Any) -> None:
    pressed = [item_of(lab, 20 + i, i, 90, temperature=i % 2) for i in range(6)]
    run = same(lab, together(pressed, pages=16, prefix_caching=caching))
    assert run.evidence["preemptions"] > 0
