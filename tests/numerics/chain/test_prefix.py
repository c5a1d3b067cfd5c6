"""A cold prompt = one whose beginning comes from the cache, at every length around pages and chunks."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.verify.items import make_item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Script, Setup, Start


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_shared_prefix_of(length: int, lab: Lab, item_of: Any, same: Any) -> None:
    item = item_of(lab, length + 3, length, 8, temperature=length % 2)
    first = make_item("first", [*item.prompt[:length], 5, 6, 7, 8, 9], 1, 2)
    run = same(lab, Script((Start(item),), before=(first,)))
    assert run.outcomes[0].cached_tokens == length // PAGE_SIZE * PAGE_SIZE


@pytest.mark.parametrize("length", [16, 17, 48, 64])
def test_the_same_prompt_again(length: int, lab: Lab, item_of: Any, same: Any) -> None:
    """Never the last token: its logits are due."""
    item = item_of(lab, length, length)
    run = same(lab, Script((Start(item), Start(item, at=3)), before=(item,)))
    assert run.outcomes[0].cached_tokens == (length - 1) // PAGE_SIZE * PAGE_SIZE


def test_pages_of_a_reply_serve_the_next_turn(lab: Lab, item_of: Any, same: Any) -> None:
    """What decode steps wrote is read by a prefill."""
    turn = item_of(lab, 20, 3, 60, temperature=1.0)
    reply = lab.alone(turn).token_ids
    following = make_item("next turn", [*turn.prompt, *reply, 1, 2, 3], 4, 8)
    run = same(lab, Script((Start(following),), before=(turn,)))
    assert run.outcomes[0].cached_tokens >= 64


def test_cold_without_a_cache(lab: Lab, item_of: Any, same: Any) -> None:
    item = item_of(lab, 100, 5)
    run = same(lab, Script((Start(item),), Setup(prefix_caching=False), before=(item,)))
    assert run.outcomes[0].cached_tokens == 0
