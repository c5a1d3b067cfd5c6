"""After an exchange of weights = a fresh engine with these weights, and after the way back = before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed import LLM, SamplingParams


@pytest.fixture(scope="module")
def two(make_checkpoint: Any, llm_folder: Any) -> tuple[Path, ...]:
    """Two checkpoints of one shape; what differs in their `config.json` computes nothing."""
    shape = {"dtype": torch.bfloat16, "tie_word_embeddings": False}
    return tuple(llm_folder(make_checkpoint("Llama", pad_token_id=i, **shape)) for i in (0, 1))


def replies(llm: LLM) -> list[Any]:
    params = SamplingParams(seed=5, max_tokens=10, logprobs=0, ignore_eos=True)
    outputs = llm.generate([list(range(40)), list(range(30, 70))], params)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_there_and_back(two: tuple[Path, ...]) -> None:
    with LLM(two[0], numerics="rl-bitwise", max_model_len=256, num_kv_pages=64) as llm:
        prints = [llm.engine.fingerprint]
        first = replies(llm)
        assert replies(llm) == first
        assert llm.stats().cached_tokens > 0
        cached = llm.stats().cached_tokens
        llm.update_weights(two[1])
        prints.append(llm.engine.fingerprint)
        second = replies(llm)
        assert llm.stats().cached_tokens == cached, "the old weights' prefixes were read"
        assert second != first
        llm.update_weights(two[0])
        prints.append(llm.engine.fingerprint)
        assert replies(llm) == first
    assert prints[0] == prints[2] != prints[1]
    with LLM(two[1], numerics="rl-bitwise", max_model_len=256, num_kv_pages=64) as fresh:
        assert replies(fresh) == second
