"""Defaults of sampling: the checkpoint's own, unless the user or the request says otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.engine.validation import Limits as EngineLimits
from tokenspeed.errors import CheckpointError
from tokenspeed.loading.generation_config import OPENAI_DEFAULTS, SamplingDefaults, sampling_defaults
from tokenspeed.server.limits import Limits
from tokenspeed.server.openai import ChatCompletionRequest, CompletionRequest
from tokenspeed.verify.replay import read_saved

QWEN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "eos_token_id": 2,
}
LIMITS = Limits(EngineLimits(vocab_size=100, max_model_len=32))


def write(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_a_file_is_read_under_auto_only(tmp_path: Path) -> None:
    folder = write(tmp_path, QWEN)
    found = sampling_defaults(folder, "auto")
    assert found == SamplingDefaults(0.6, 0.95, 20, 0.0, 1.05)
    assert found.changed() == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert sampling_defaults(folder, "none") == OPENAI_DEFAULTS


@pytest.mark.parametrize("content", [{}, {"temperature": None}, {"do_sample": False, "max_new_tokens": 9}])
def test_what_a_file_does_not_say_stays(content: object, tmp_path: Path) -> None:
    assert sampling_defaults(write(tmp_path, content), "auto") == OPENAI_DEFAULTS


def test_without_a_file(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, "auto").changed() == {}


@pytest.mark.parametrize("value", ["0.7", True, [1]])
def test_a_value_of_no_use_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="temperature is"):
        sampling_defaults(write(tmp_path, {"temperature": value}), "auto")


@pytest.mark.parametrize("values", [{"temperature": -1}, {"top_p": 0.0}, {"top_k": 2**40}, {"repetition_penalty": 0}])
def test_a_value_that_no_request_may_have_is_refused_at_the_start(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{next(iter(values))}: .* is out of range; .*--generation-config none"):
        sampling_defaults(write(tmp_path, values), "auto")


@pytest.mark.parametrize(("content", "words"), [(b"[]", "JSON object"), (b"{", "valid JSON"), (b"\xff", "UTF-8")])
def test_a_file_that_is_none_is_refused_by_name(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"generation_config.json .*{words}"):
        sampling_defaults(tmp_path, "auto")


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    folder = write(tmp_path, QWEN)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(CheckpointError, match=r"generation_config.json cannot be read: Permission denied"):
        sampling_defaults(folder, "auto")


def test_a_request_wins_over_the_file() -> None:
    defaults = SamplingDefaults(0.6, 0.95, 20, 0.1, 1.05)
    silent = CompletionRequest(prompt="x").sampling_params(LIMITS, logprobs=None, max_tokens=4, defaults=defaults)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p) == (0.6, 0.95, 20, 0.1)
    assert silent.repetition_penalty == 1.05
    # A rollout client says everything, and gets what it says.
    said = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **said})
    spoken = body.sampling_params(LIMITS, logprobs=None, max_tokens=4, defaults=defaults)
    assert (spoken.temperature, spoken.top_p, spoken.top_k, spoken.min_p) == (1.0, 1.0, 0, 0.0)
    assert spoken.repetition_penalty == 1.0


def test_replies_state_defaults_that_are_not_the_usual_ones_and_a_replay_reads_them() -> None:
    assert LIMITS.stated == {}
    stated = replace(LIMITS, defaults=SamplingDefaults(temperature=0.6, top_k=20)).stated
    assert stated == {"sampling_defaults": {"temperature": 0.6, "top_k": 20}}
    choice = {"token_ids": [5], "prompt_token_ids": [1, 2], "seed": 7, "index": 0, "finish_reason": "length"}
    line = {"request": {"prompt": "x", "max_tokens": 1, "top_k": 3}, "response": {"choices": [choice], **stated}}
    (saved,) = read_saved([json.dumps(line).encode()])
    assert (saved.item.params.temperature, saved.item.params.top_k) == (0.6, 3)
