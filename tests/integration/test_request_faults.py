"""Requests that other servers answer with a 500, a hang or a wrong number: each must get its right answer here, and the
server must be as healthy afterwards as before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

PROMPT = [5, 90, 17, 230]
HUGE = 10**30


@pytest.fixture(autouse=True)
def _still_healthy(http: httpx.Client, wait_idle: Any) -> Iterator[None]:
    """After every test here the engine lives, is idle, and holds no page."""
    yield
    assert http.get("/health").status_code == 200
    assert wait_idle(http)["pages_used"] == 0


def refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a well-formed refusal."""
    assert reply.status_code == status, reply.text[:500]
    error: dict[str, Any] = reply.json()["error"]
    assert error["code"] == status
    assert error["message"]
    assert error["type"]
    assert len(reply.content) < 8192
    return error


BAD_FIELDS: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", -1),
    ("n", 10**6),
    ("n", HUGE),
    ("n", True),
    ("n", "2"),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", HUGE),
    ("min_tokens", 9),
    ("logprobs", 21),
    ("logprobs", -2),
    ("logprobs", -1),
    ("prompt_logprobs", 21),
    ("seed", 2**63),
    ("seed", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 65),
    ("stop", ["a" * 2000]),
    ("stop", [1]),
    ("stop_token_ids", [9999999]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {"9999999": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "high"}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [320]),
    ("logprob_token_ids", [5]),
    ("stream_options", {"include_usage": True}),
    ("best_of", 4),
    ("suffix", "tail"),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema"}),
    ("structured_outputs", {"regex": "a+"}),
    ("guided_regex", "a+"),
    ("use_beam_search", True),
    ("logprobs_mode", "raw_logprobs"),
    ("max_token", 5),
    ("sampling_seed", 5),
    ("request_id", ""),
    ("request_id", "x" * 200),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda part: str(part)[:24])
def test_a_wrong_field_is_refused_by_name(http: httpx.Client, field: str, value: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, field: value}
    error = refused(http.post("/v1/completions", json=body))
    assert error["param"] == field
    if field != "stream_options":
        assert refused(http.post("/v1/completions", json={**body, "stream": True}))["param"] == field


BAD_PROMPTS: list[Any] = [
    [],
    [[]],
    "",
    [""],
    [9999999],
    [320],
    [-1],
    [HUGE],
    [True],
    [1.0],
    [None],
    [1, "a"],
    ["a", 1],
    [[1], [2, "b"]],
    [[1], 2],
    {},
    None,
    5,
    [[[1]]],
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda part: repr(part)[:24])
def test_a_wrong_prompt_is_refused(http: httpx.Client, prompt: Any) -> None:
    refused(http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}))
    refused(http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "stream": True}))


@pytest.mark.parametrize("stream", [False, True])
def test_the_context_limit_is_exact(http: httpx.Client, stream: bool) -> None:
    def ask(length: int, **more: Any) -> httpx.Response:
        return http.post("/v1/completions", json={"prompt": [7] * length, "stream": stream, **more})

    for length in (512, 513, 4000):
        error = refused(ask(length, max_tokens=1))
        assert f"{length} input tokens" in error["message"]
        assert "maximum context length is 512 tokens" in error["message"]
        assert error["param"] == "input_tokens"
        assert error["reason"] == "context_length_exceeded"
    assert ask(511, max_tokens=1).status_code == 200


def test_max_tokens_is_clamped_to_the_context(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json={"prompt": [7] * 500, "max_tokens": 100, "ignore_eos": True}).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 12


def test_a_full_context_can_be_scored(http: httpx.Client) -> None:
    body = {"prompt": [7] * 512, "max_tokens": 0, "echo": True, "logprobs": 0}
    reply = http.post("/v1/completions", json=body).json()
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 512
    assert reply["usage"]["completion_tokens"] == 0


def test_a_text_far_over_the_limit_is_refused_without_reading_it(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": "word " * 2_000_000}))
    assert "at least" in error["message"]


def test_min_tokens_holds_back_stop_strings_and_eos(http: httpx.Client) -> None:
    plain = {"prompt": PROMPT, "max_tokens": 30, "seed": 3, "return_token_ids": True, "ignore_eos": True}
    text = http.post("/v1/completions", json=plain).json()["choices"][0]["text"]
    stop = next(character for character in text if character.isascii() and character.isalpha())
    body = {**plain, "min_tokens": 20, "stop": [stop]}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert len(choice["token_ids"]) >= 20
    unheld = http.post("/v1/completions", json={**body, "min_tokens": 0}).json()["choices"][0]
    assert unheld["stop_reason"] == stop
    assert unheld["text"] == text[: text.index(stop)]


def test_after_a_stop_all_lists_and_counts_agree(http: httpx.Client) -> None:
    plain = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    text = http.post("/v1/completions", json=plain).json()["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    reply = http.post("/v1/completions", json={**plain, "stop": stop}).json()
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert stop not in choice["text"]
    counts = {len(choice["token_ids"]), len(choice["logprobs"]["tokens"]), reply["usage"]["completion_tokens"]}
    assert len(counts) == 1
    kept = http.post("/v1/completions", json={**plain, "stop": stop, "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"].endswith(stop)


def test_eos_and_stop_ids_are_told_apart(http: httpx.Client) -> None:
    def ask(**more: Any) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "return_token_ids": True, **more}
        choice: dict[str, Any] = http.post("/v1/completions", json=body).json()["choices"][0]
        return choice

    always = {"logit_bias": {"3": 100}}
    ended = ask(**always)
    assert (ended["finish_reason"], ended["stop_reason"], ended["token_ids"]) == ("stop", None, [3])
    ignored = ask(**always, ignore_eos=True)
    assert (ignored["finish_reason"], len(ignored["token_ids"])) == ("length", 10)
    named = ask(**always, ignore_eos=True, stop_token_ids=[3])
    assert (named["finish_reason"], named["stop_reason"]) == ("stop", 3)
    held = ask(**always, min_tokens=4)
    assert len(held["token_ids"]) >= 4
    assert 3 not in held["token_ids"][:4]


def test_prompt_logprobs_are_the_same_bits_cached_or_not(http: httpx.Client) -> None:
    shared = [(7 * i) % 300 for i in range(64)]

    def entries(prompt: list[int]) -> Any:
        body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
        return http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]

    first = entries(shared)
    assert len(first) == 64
    assert entries(shared) == first
    longer = entries([*shared, 9, 10])
    assert longer[:64] == first
    assert len(longer) == 66


def test_greedy_output_rescored_as_a_prompt_has_the_same_ranks(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "n": 4, "logprobs": 2, "seed": 5, "return_token_ids": True}
    choices = http.post("/v1/completions", json={**body, "ignore_eos": True}).json()["choices"]
    for choice in choices:
        again = {"prompt": PROMPT + choice["token_ids"], "max_tokens": 0, "echo": True, "logprobs": 2}
        scored = http.post("/v1/completions", json=again).json()["choices"][0]["logprobs"]["token_logprobs"]
        assert scored[len(PROMPT) :] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}, {"logit_bias": {"9": 5}}])
def test_logprobs_are_of_the_whole_distribution_after_temperature(http: httpx.Client, options: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0.6, "seed": 1, "return_token_ids": True, "logprobs": 0}
    reply = http.post("/v1/completions", json={**body, **options}).json()
    assert reply["logprobs_mode"] == "processed"
    (token,) = reply["choices"][0]["token_ids"]
    score = {**body, "logprobs": 0, "logprob_token_ids": [token]}
    name = f"token_id:{token}"
    tables = [
        http.post("/v1/completions", json={**request, "return_tokens_as_token_ids": True}).json()["choices"][0]
        for request in (score, {**score, **options})
    ]
    values = [table["logprobs"]["top_logprobs"][0][name] for table in tables]
    assert values[0] == values[1] == reply["choices"][0]["logprobs"]["token_logprobs"][0]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"nan", b'"text"', b"[" * 100_000, b"\xff\xfe", b"1" * 9999]
)
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    refused(http.post("/v1/completions", content=content, headers=headers))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_wrong_content_type_is_refused(http: httpx.Client, kind: str) -> None:
    content = json.dumps({"prompt": PROMPT}).encode()
    error = refused(http.post("/v1/completions", content=content, headers={"content-type": kind}))
    assert "application/json" in error["message"]


def test_nan_and_lone_surrogates_are_no_json(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for content in (b'{"prompt":"a","temperature":NaN}', b'{"prompt":"\\ud800"}', b'{"prompt":"a","top_p":1e999}'):
        refused(http.post("/v1/completions", content=content, headers=headers))


def test_a_hostile_body_is_not_echoed(http: httpx.Client) -> None:
    for body in ({"prompt": PROMPT, "stop": [0] * 100_000}, {"prompt": PROMPT, "model": "x" * 1_000_000}):
        reply = http.post("/v1/completions", json=body)
        assert reply.status_code in (400, 404)
        assert len(reply.content) < 4096
    reply = http.post("/v1/completions", json={"prompt": PROMPT, "y" * 1_000_000: 1})
    assert len(reply.content) < 4096


def test_a_body_over_the_limit_is_refused_announced_or_not(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    block = b" " * (1 << 20)

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield block

    refused(http.post("/v1/completions", content=parts(), headers=headers), 413)


def test_unknown_routes_methods_and_models_have_openai_bodies(http: httpx.Client) -> None:
    assert refused(http.get("/v1/completions"), 405)
    assert refused(http.delete("/v1/models"), 405)
    assert refused(http.get("/v1/nothing"), 404)
    error = refused(http.post("/v1/completions", json={"model": "nope", "prompt": "x"}), 404)
    assert error["message"] == "The model `nope` does not exist."
    assert error["param"] == "model"
    assert error["reason"] == "model_not_found"


def test_a_misspelt_field_names_the_right_one(http: httpx.Client) -> None:
    error = refused(http.post("/v1/completions", json={"prompt": PROMPT, "temprature": 0}))
    assert "did you mean `temperature`" in error["message"]


def test_harmless_fields_are_accepted(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "user": "u", "priority": 3, "cache_salt": "s", "best_of": 1, "top_k": -1}
    body |= {"suffix": None, "use_beam_search": False, "length_penalty": 1.0, "response_format": {"type": "text"}}
    assert http.post("/v1/completions", json=body).status_code == 200


BAD_CHATS: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "hi"},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"tools": []},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"max_completion_tokens": 0},
    {"echo": True},
    {"chat_template": "{{ 1 }}"},
    {"chat_template_kwargs": {"messages": []}},
    {"add_generation_prompt": True, "continue_final_message": True},
    {"functions": [{"name": "f"}]},
]


@pytest.mark.parametrize("more", BAD_CHATS, ids=lambda part: repr(part)[:40])
def test_a_wrong_chat_is_refused(http: httpx.Client, more: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **more}
    refused(http.post("/v1/chat/completions", json=body))


def test_tools_that_must_not_be_called_reach_the_template(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "tools": tools, "tool_choice": "none"}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_content_parts_and_continuing_an_answer(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, "return_prompt_text": True}
    assert "a\nb" in http.post("/v1/chat/completions", json=body).json()["prompt_text"]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    body = {"messages": messages, "max_tokens": 2, "continue_final_message": True, "return_prompt_text": True}
    assert http.post("/v1/chat/completions", json=body).json()["prompt_text"].endswith("The answer")


def test_more_tokens_than_a_context_holds_are_not_decoded(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [5] * 512}).status_code == 200
    assert "512" in refused(http.post("/detokenize", json={"tokens": [5] * 513}))["message"]


def test_tokens_go_there_and_back(http: httpx.Client) -> None:
    text = "def äöü 🎉 tokens"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    back = http.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back["prompt"] == back["text"] == text
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["tokens"][0] == 1
    assert http.post("/detokenize", json={"tokens": []}).json()["text"] == ""
    for tokens in ([99999999], [-1], [HUGE], ["a"], [1.5]):
        refused(http.post("/detokenize", json={"tokens": tokens}))
    refused(http.post("/tokenize", json={}))
    refused(http.post("/tokenize", json={"prompt": "a", "messages": [{"role": "user", "content": "x"}]}))
