"""The engine on this GPU with the embedded model: recorded steps, steps issued ahead, memory, settings, verifying."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from tokenspeed import LLM, SamplingParams
from tokenspeed.config_sources import load_config
from tokenspeed.errors import StartRefused
from tokenspeed.results import RequestOutput
from tokenspeed.startup import prepare
from tokenspeed.verify.invariance import verify_engine
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.scenario import QUICK

DEVICE = "cuda"

PROMPTS = [f"{i} + {i} =" * (1 + i % 5) for i in range(23)]
PARAMS = [
    SamplingParams(seed=i, temperature=(0.0, 1.0, 0.7)[i % 3], top_k=(0, 20)[i % 2], max_tokens=40, logprobs=0)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(numerics="rl-bitwise", device=DEVICE, max_num_seqs=32) as model:
        yield model


def bits(replies: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Token ids and logprobs, which hold an fp32 exactly."""
    found = []
    for reply in replies:
        (output,) = reply.outputs
        assert output.logprobs is not None
        scores = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        found.append((list(output.token_ids), scores))
    return found


def test_recorded_steps_and_steps_ahead_have_the_bits_of_eager_ones(llm: LLM) -> None:
    recorded = bits(llm.generate(PROMPTS, PARAMS))
    assert llm.engine.replays > 20
    assert llm.engine.steps_ahead > 20
    with LLM(numerics="rl-bitwise", device=DEVICE, max_num_seqs=32, decode_graphs=False) as eager:
        assert bits(eager.generate(PROMPTS, PARAMS)) == recorded
        assert eager.engine.replays == 0
    alone = [bits(llm.generate([prompt], [params]))[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert alone == recorded


@pytest.mark.parametrize("recorded", [True, False])
def test_nothing_is_compiled_while_requests_are_served(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of every size up to the largest step, alone and together, and everything that a request may ask for."""
    compiled: list[str] = []
    asking = [
        SamplingParams(max_tokens=3, seed=1, top_p=0.9, repetition_penalty=1.1, logprobs=5, ignore_eos=True),
        SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=3, logit_bias={7: 1.0}, ignore_eos=True),
        SamplingParams(max_tokens=3, seed=2, logprobs=15, min_p=0.1, ignore_eos=True),
    ]
    with LLM(numerics="rl-bitwise", device=DEVICE, max_num_seqs=32, decode_graphs=recorded) as llm:
        hook = triton.knobs.runtime
        monkeypatch.setattr(hook, "jit_cache_hook", lambda repr, **_: compiled.append(repr))
        for length in (1, 2, 15, 16, 17, 63, 64, 65, 130, 700, 1030, 1500):
            llm.generate([[9] * length], [asking[length % 3]])
        llm.generate([[9] * (1 + 40 * i) for i in range(40)], [asking[i % 3] for i in range(40)])
    assert compiled == []


def test_few_rows_in_a_bucket_after_many(llm: LLM) -> None:
    """Whatever the rows of a bucket held before, those that are nobody's change nothing."""
    expected = bits(llm.generate(PROMPTS[:5], PARAMS[:5]))
    llm.generate(PROMPTS[:8], PARAMS[:8])
    assert bits(llm.generate(PROMPTS[:5], PARAMS[:5])) == expected


def test_new_weights_are_recorded_anew(llm: LLM) -> None:
    expected = bits(llm.generate(PROMPTS[:5], PARAMS[:5]))
    folder = Path(prepare(load_config({"device": DEVICE}, environ={})).checkpoint.folder)
    llm.engine.install_weights(llm.engine.stage_weights(folder))
    assert bits(llm.generate(PROMPTS[:5], PARAMS[:5])) == expected


def test_settings_of_the_contract(llm: LLM) -> None:
    assert llm.engine.options.ahead
    assert not torch.backends.cuda.matmul.allow_tf32
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
    assert (os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]) == ("Ring", "Simple")


def test_a_cache_that_cannot_fit_is_refused_with_numbers() -> None:
    with pytest.raises(StartRefused, match=r"\[memory\] the GPU has .* GiB free of .* GiB"):
        LLM(numerics="rl-bitwise", device=DEVICE, kv_cache_memory="1000GiB")


def test_every_equality_of_a_quick_verification_holds() -> None:
    report = verify_engine(Lab(load_config({"numerics": "rl-bitwise", "device": DEVICE}, environ={})), QUICK)
    assert {result.scenario: result.verdict for result in report.results if result.verdict != "holds"} == {}
