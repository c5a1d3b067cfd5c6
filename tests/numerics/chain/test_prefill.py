"""Logprobs of a reply = of the same tokens teacher-forced: as a prompt, in chunks, in company, through `score`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenspeed import SamplingParams
from tokenspeed.verify.items import Item, float_bits
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import alone, together


def forced(lab: Lab, item: Item) -> Item:
    """The item's prompt and reply as a prompt, of which every logprob is wanted."""
    prompt = [*item.prompt, *lab.alone(item).token_ids]
    return item.but(f"forced {item.name}", prompt=prompt, max_tokens=0, prompt_logprobs=0)


@pytest.mark.parametrize("chunk", [None, 1, 17])
def test_decode_equals_prefill(chunk: int | None, lab: Lab, items: list[Item]) -> None:
    chosen = items[:8] if chunk == 1 else items
    run = lab.run(together([forced(lab, item) for item in chosen], max_chunk=chunk))
    compared = 0
    for item, outcome in zip(chosen, run.outcomes, strict=True):
        reply = torch.tensor(lab.alone(item).bits)
        assert torch.equal(torch.tensor(outcome.prompt_bits[len(item.prompt) - 1 :]), reply), item.name
        compared += len(reply)
    assert compared == 12 * len(chosen)
    assert chunk is None or run.evidence["chunked prefills"] > 0


def test_prompt_logprobs_do_not_depend_on_the_batch(lab: Lab, items: list[Item], same: Any) -> None:
    scored = [forced(lab, item) for item in items]
    run = lab.run(together(scored))
    same.replies(run.outcomes, [lab.run(alone(item)).outcomes[0] for item in scored])


def test_a_long_decode(lab: Lab, item_of: Any) -> None:
    """Differences of other engines showed first at token 125."""
    item = item_of(lab, 11, 5, 200, temperature=1.0)
    outcome = lab.run(alone(forced(lab, item))).outcomes[0]
    assert torch.equal(torch.tensor(outcome.prompt_bits[10:]), torch.tensor(lab.alone(item).bits))


def test_score_and_generate_of_the_python_api(llm: Any) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7, 8]], params)
    sample = output.outputs[0]
    generated = [position[token].logprob for position, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    (score,) = llm.score([[5, 6, 7, 8, *sample.token_ids]], temperature=0.7)
    prompt = [p[t].logprob for p, t in zip(output.prompt_logprobs[1:], [6, 7, 8], strict=True)]
    expected = torch.tensor([float_bits(value) for value in (*prompt, *generated)])
    assert torch.equal(torch.tensor([float_bits(value) for value in score.logprobs[1:]]), expected)


def test_company_does_not_change_what_a_scored_prompt_leaves_behind(lab: Lab, items: list[Item], same: Any) -> None:
    """Scoring reads no cached prefix but may fill pages; a later request reads them."""
    item = items[4]
    script = replace(together([item]), before=(forced(lab, item),))
    run = same(lab, script)
    assert run.outcomes[0].cached_tokens > 0
