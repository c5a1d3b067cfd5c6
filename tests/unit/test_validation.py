"""Every parameter in its range, and every refusal names its field."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.engine.request import Request, SamplingParams
from tokenspeed.engine.validation import Limits, validate
from tokenspeed.errors import ContextOverflow, RequestError

LIMITS = Limits(vocab_size=100, max_model_len=32, eos_ids=(7,))

BAD: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("n", {"n": 100_000}),
    ("temperature", {"temperature": -1.0}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("top_k", {"top_k": -2}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.1}),
    ("min_p", {"min_p": -0.1}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": 1e-40}),
    ("seed", {"seed": 2**63}),
    ("max_tokens", {"max_tokens": -1}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("logit_bias", {"logit_bias": {100: 1.0}}),
    ("logit_bias", {"logit_bias": {1: 101.0}}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [-1]}),
    ("allowed_token_ids", {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}),
    ("allowed_token_ids", {"allowed_token_ids": [5, 7], "stop_token_ids": [5], "min_tokens": 1}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["x"] * 65}),
    ("stop", {"stop": ["x" * 2000]}),
    ("stop", {"stop": ["x"], "detokenize": False}),
    ("stop_token_ids", {"stop_token_ids": [100]}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": -2}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("logprob_token_ids", {"logprob_token_ids": [1]}),
    ("logprob_token_ids", {"logprob_token_ids": [100], "logprobs": 0}),
]


def check(prompt: list[Any], limits: Limits = LIMITS, **params: Any) -> None:
    validate(Request(id="a", prompt=prompt, seed=0, params=SamplingParams(**params)), limits)


@pytest.mark.parametrize(("field", "params"), BAD, ids=lambda value: str(value)[:40])
def test_refusals_name_the_field(field: str, params: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        check([1, 2], **params)
    assert refused.value.param == field
    assert field in str(refused.value)


@pytest.mark.parametrize("prompt", [[], [-1], [100], [1, 10**12], [1.5], [True]])
def test_bad_prompts(prompt: list[Any]) -> None:
    with pytest.raises(RequestError) as refused:
        check(prompt)
    assert refused.value.param == "prompt"


def test_context() -> None:
    check([1] * 31)
    check([1] * 31, max_tokens=10_000)
    check([1] * 32, max_tokens=0)
    with pytest.raises(ContextOverflow, match="32 tokens"):
        check([1] * 32)
    with pytest.raises(ContextOverflow):
        check([1] * 33, max_tokens=0)


def test_unlimited_logprobs() -> None:
    free = Limits(vocab_size=100, max_model_len=32, max_logprobs=-1)
    check([1], free, logprobs=-1, prompt_logprobs=-1)
    check([1], free, logprobs=5000)
