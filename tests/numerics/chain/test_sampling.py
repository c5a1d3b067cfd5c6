"""Every way of sampling, all in one batch = each alone; and each of them does something."""

from __future__ import annotations

from typing import Any

from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import together

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 30.0},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.3},
    "min-p": {"min_p": 0.6},
    "all filters": {"top_k": 20, "top_p": 0.5, "min_p": 0.05},
    "repetition": {"temperature": 0.05, "repetition_penalty": 4.0},
    "frequency": {"temperature": 0.05, "frequency_penalty": 2.0},
    "presence": {"temperature": 0.05, "presence_penalty": 2.0},
    "bias": {"logit_bias": {3: 50.0, 4: 50.0}},
    "allowed": {"allowed_token_ids": [10, 11, 12]},
    "min tokens": {"min_tokens": 10, "stop_token_ids": list(range(0, 320, 2))},
}
PENALTIES = {"repetition", "frequency", "presence"}


def test_ways_in_one_batch(lab: Lab, item_of: Any, same: Any) -> None:
    base = item_of(lab, 24, 12345, 40)
    ways = [base.but(name, **changes) for name, changes in WAYS.items()]
    run = same(lab, together([*ways, *reversed(ways)]))
    assert max(run.batch_sizes) == 2 * len(WAYS)
    replies = {way.name: lab.alone(way).token_ids for way in ways}
    assert {name for name in WAYS if replies[name] == replies["plain"]} == {"plain"}
    assert not {name for name in PENALTIES if replies[name] == replies["cold"]}


def test_parameters_only_choose_tokens_and_never_change_a_logprob(lab: Lab, item_of: Any) -> None:
    """The reported distribution is the model's own after temperature."""
    base = item_of(lab, 24, 1, 1)
    ways = {name: changes for name, changes in WAYS.items() if not {"temperature", "min_tokens"} & changes.keys()}
    first = {name: lab.alone(base.but(name, **changes)) for name, changes in ways.items()}
    by_token: dict[int, set[int]] = {}
    for outcome in first.values():
        by_token.setdefault(outcome.token_ids[0], set()).add(outcome.bits[0])
    assert len(by_token) < len(first)
    assert all(len(found) == 1 for found in by_token.values())


def test_alternatives_and_their_ranks(lab: Lab, item_of: Any) -> None:
    """What is reported beside the token is as reproducible as the token."""
    ways = [item_of(lab, 5 + i, i, 8, temperature=i % 2, logprobs=top) for i, top in enumerate((1, 5, 20, 3))]
    plain = [item_of(lab, 9 + i, 50 + i, 8) for i in range(6)]
    run = lab.run(together([*plain, *ways, *reversed(ways)]))
    for way, first, second in zip(ways, run.outcomes[6:10], reversed(run.outcomes[10:]), strict=True):
        assert len(first.alternatives) == 8 * (way.params.logprobs or 0)
        assert first.alternatives == second.alternatives == lab.alone(way).alternatives
