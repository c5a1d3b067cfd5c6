"""SGLang's native routes and the token-in, token-out route, as trainers call them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PROMPT = [5, 90, 17, 230, 41]


def ask(http: httpx.Client, **body: Any) -> Any:
    """The reply of `/generate`."""
    reply = http.post("/generate", json={"input_ids": PROMPT, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(reply: httpx.Response) -> list[Any]:
    """The JSON events of a stream, which must end with `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_generate_reports_tokens_logprobs_and_how_it_ended(http: httpx.Client) -> None:
    sampling = {"max_new_tokens": 6, "sampling_seed": 4, "ignore_eos": True}
    reply = ask(http, sampling_params=sampling, return_logprob=True, top_logprobs_num=2, rid="r1")
    meta = reply["meta_info"]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == 6
    assert meta["prompt_tokens"] == len(PROMPT)
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    assert meta["input_token_logprobs"] == []
    assert all(entry[2] is None for entry in meta["output_token_logprobs"])


def test_the_seed_has_one_effect_on_every_route(http: httpx.Client) -> None:
    def native(seed: int) -> list[int]:
        ids: list[int] = ask(http, sampling_params={"max_new_tokens": 12, "sampling_seed": seed})["output_ids"]
        return ids

    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 7, "return_token_ids": True}
    openai_ids = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    tokens = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 12, "seed": 7}}
    token_ids = http.post("/inference/v1/generate", json=tokens).json()["choices"][0]["token_ids"]
    assert native(7) == native(7) == openai_ids == token_ids
    assert native(8) != native(7)


@pytest.mark.parametrize("alias", ["seed", "random_seed", "sampling_sed"])
def test_an_unknown_seed_alias_is_refused(http: httpx.Client, alias: str) -> None:
    reply = http.post("/generate", json={"input_ids": PROMPT, "sampling_params": {alias: 7}})
    assert reply.status_code == 400
    assert alias in reply.json()["error"]["message"]


def test_a_batch_is_answered_in_order_each_with_its_own_parameters(http: httpx.Client) -> None:
    body = {
        "input_ids": [PROMPT, [9, 9]],
        "sampling_params": [{"max_new_tokens": 2, "ignore_eos": True}, {"max_new_tokens": 3, "ignore_eos": True}],
        "rid": ["a", "b"],
    }
    replies = ask(http, **body)
    assert [reply["meta_info"]["id"] for reply in replies] == ["a", "b"]
    assert [len(reply["output_ids"]) for reply in replies] == [2, 3]
    group = ask(http, sampling_params={"n": 3, "max_new_tokens": 8})
    assert len({tuple(reply["output_ids"]) for reply in group}) == 3


def test_a_prompt_can_be_scored_alone_and_says_by_which_weights(http: httpx.Client) -> None:
    reply = ask(http, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert [entry[1] for entry in reply["meta_info"]["input_token_logprobs"]] == PROMPT
    assert reply["output_ids"] == []
    assert reply["meta_info"]["weight_version"] == http.get("/get_weight_version").json()["weight_version"]
    tokens = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 0, "prompt_logprobs": 0}}
    scored = http.post("/inference/v1/generate", json=tokens).json()
    assert len(scored["prompt_logprobs"]) == len(PROMPT)
    assert scored["choices"][0]["weight_versions"] == []


def test_prompt_logprobs_start_where_asked_with_a_null(http: httpx.Client) -> None:
    body = {"sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True}
    whole = ask(http, **body, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in whole] == PROMPT
    assert whole[0][0] is None
    tail = ask(http, **body, logprob_start_len=2)["meta_info"]["input_token_logprobs"]
    assert tail[0] == [None, PROMPT[2], None]
    assert tail[1:] == whole[3:]


def test_streamed_events_are_cumulative(http: httpx.Client) -> None:
    body = {"sampling_params": {"max_new_tokens": 5, "sampling_seed": 2, "ignore_eos": True}, "return_logprob": True}
    whole = ask(http, **body)
    found = events(http.post("/generate", json={"input_ids": PROMPT, **body, "stream": True}))
    lengths = [len(event["output_ids"]) for event in found]
    assert lengths == sorted(lengths)
    assert found[-1]["output_ids"] == whole["output_ids"]
    assert found[-1]["text"] == whole["text"]
    assert found[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    assert [event["meta_info"]["finish_reason"] for event in found[:-1]] == [None] * (len(found) - 1)


def test_chosen_ids_are_scored_at_each_position(http: httpx.Client) -> None:
    body = {"sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "return_logprob": True}
    meta = ask(http, **body, token_ids_logprob=[11, 300])["meta_info"]
    assert [[entry[1] for entry in row] for row in meta["output_token_ids_logprobs"]] == [[11, 300]] * 3


def test_stop_reports_what_matched(http: httpx.Client) -> None:
    always = {"max_new_tokens": 5, "temperature": 0, "logit_bias": {"3": 100}}
    assert ask(http, sampling_params=always)["meta_info"]["finish_reason"] == {"type": "stop", "matched": 3}


BAD: list[dict[str, Any]] = [
    {"input_ids": []},
    {"text": "a"},
    {"input_ids": [99999]},
    {"rid": ["a", "b"]},
    {"sampling_params": [{}, {}]},
    {"sampling_params": {"regex": "a"}},
    {"return_hidden_states": True},
    {"unknown": 1},
    {"return_logprob": True, "top_logprobs_num": 50},
    {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [4]},
]


@pytest.mark.parametrize("more", BAD, ids=lambda part: repr(part)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_generate_request_is_refused(http: httpx.Client, more: dict[str, Any], stream: bool) -> None:
    reply = http.post("/generate", json={"input_ids": PROMPT, **more, "stream": stream})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]


def test_tokens_in_tokens_out(http: httpx.Client) -> None:
    sampling = {"max_tokens": 4, "seed": 5, "logprobs": 1, "prompt_logprobs": 1, "n": 2, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "request_id": "q"}
    reply = http.post("/inference/v1/generate", json=body).json()
    assert reply["request_id"] == "q"
    assert len(reply["prompt_logprobs"]) == len(PROMPT)
    for choice in reply["choices"]:
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
        assert choice["finish_reason"] == "length"
    del sampling["prompt_logprobs"]
    found = events(http.post("/inference/v1/generate", json={**body, "stream": True}))
    for choice in reply["choices"]:
        parts = [part for event in found for part in event["choices"] if part["index"] == choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    assert found[-1]["usage"]["completion_tokens"] == 8


def test_what_trainers_probe_before_they_start(http: httpx.Client) -> None:
    assert http.get("/health_generate").status_code == 200
    assert http.get("/liveness").json() == {"status": "alive"}
    assert http.get("/get_world_size").json() == {"world_size": 1}
    info = http.get("/server_info").json()
    assert info["tp_size"] == info["pp_size"] == 1
    assert info["vllm_config"]["model_config"]["dtype"] == "float32"
    assert http.get("/model_info").json()["architectures"] == ["Qwen3ForCausalLM"]
    assert "weight_version" in http.get("/get_weight_version").json()
    assert http.get("/v1/loads?include=core").json()["loads"][0]["num_total_reqs"] == 0
    assert http.post("/flush_cache").status_code == 200
