"""The smallest end-to-end check: the embedded model answers, through the public door and by default."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)
MOST_BYTES = 12_000_000


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(numerics="rl-bitwise") as model:
        yield model


def test_it_answers_a_question(llm: LLM) -> None:
    (reply,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert reply.outputs[0].text == "The capital of France is Paris."
    assert reply.outputs[0].finish_reason == "stop"


def test_it_continues_a_text(llm: LLM) -> None:
    (reply,) = llm.generate("The cat", SamplingParams(seed=1, max_tokens=40))
    text = reply.outputs[0].text
    assert text.startswith(" ")
    assert text.rstrip().endswith((".", '"'))


def test_it_solves_about_half_of_the_additions(llm: LLM) -> None:
    """Neither hopeless nor solved: reinforcement learning needs a reward that can rise."""
    pairs = [(a, b) for a in range(10, 100, 6) for b in range(10, 100, 6)]
    prompts = [f"{a}+{b}=" for a, b in pairs]
    sampled = llm.generate(prompts, [SamplingParams(seed=seed, max_tokens=5) for seed in range(len(prompts))])
    right = [reply.outputs[0].text == str(a + b) for reply, (a, b) in zip(sampled, pairs, strict=True)]
    assert 0.35 <= sum(right) / len(right) <= 0.65
    assert all(reply.outputs[0].finish_reason == "stop" for reply, good in zip(sampled, right, strict=True) if good)


def test_it_is_small() -> None:
    spec = importlib.util.find_spec("tokenspeed_models")
    assert spec
    assert spec.origin
    folder = Path(spec.origin).parent / "tiny"
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES
