"""A request alone = the same request beside any other: long, loud, repetitive, cancelled midway, seeded or not."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.engine.seeds import fresh_seed
from tokenspeed.verify.batching_scenarios import loud_tokens
from tokenspeed.verify.items import Item, make_item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Cancel, Script, Start


@pytest.fixture
def target(lab: Lab, item_of: Any) -> Item:
    """Long enough that a neighbour can come and go."""
    made: Item = item_of(lab, 70, 7, 80, temperature=1.0)
    return made


def neighbour(kind: str, lab: Lab, target: Item, item_of: Any) -> Item:
    loud = loud_tokens(lab)
    return {
        "long": lambda: item_of(lab, 400, 9, 4),
        "loud": lambda: make_item("loud", [loud[i % len(loud)] for i in range(200)], 1, 30),
        "one token repeated": lambda: make_item("repeated", [17] * 300, 2, 20),
        "the same": lambda: target,
        "another seed": lambda: target.but("other", seed=8),
        "no seed": lambda: target.but("unseeded", seed=fresh_seed()),
        "greedy": lambda: target.but("greedy", temperature=0.0),
        "its continuation": lambda: target.but("more", prompt=[*target.prompt, *range(30)]),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    ["long", "loud", "one token repeated", "the same", "another seed", "no seed", "greedy", "its continuation"],
)
def test_beside(kind: str, lab: Lab, target: Item, item_of: Any, same: Any) -> None:
    other = neighbour(kind, lab, target, item_of)
    starts = (Start(target), Start(other, at=0, compared=False), Start(other, at=40, compared=False))
    run = same(lab, Script(starts))
    assert run.evidence["steps of decode and prefill"] > 0


@pytest.mark.parametrize("at", [1, 4, 15, 19])
def test_sharers_of_a_prefix_are_cancelled(at: int, lab: Lab, target: Item, item_of: Any, same: Any) -> None:
    """They die while the target reads the pages that they filled, and while they fill them."""
    sharers = [target.but(f"sharer {i}", prompt=[*target.prompt[:64], i, i + 1], seed=i) for i in range(2)]
    starts = (*(Start(sharer, compared=False) for sharer in sharers), Start(target, at=2))
    run = same(lab, Script(starts, cancels=(Cancel(0, at), Cancel(1, at + 4))))
    assert run.evidence["cancelled"] == 2
    assert run.outcomes[2].cached_tokens == 64
