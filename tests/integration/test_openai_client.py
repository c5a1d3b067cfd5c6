"""The `openai` package, unchanged but for `base_url`: completions and chat, streamed and not."""

from __future__ import annotations

import struct

import httpx
import openai
import pytest

PROMPT = [5, 90, 17, 230, 41, 66, 8]


def bits(values: list[float]) -> list[int]:
    """The float32 bit patterns of JSON numbers; fails when one is not exactly a float32."""
    out = []
    for value in values:
        (single,) = struct.unpack("f", struct.pack("f", value))
        assert single == value, f"{value!r} is not a float32"
        out.append(struct.unpack("I", struct.pack("f", value))[0])
    return out


def test_completion_of_text_has_text_usage_and_a_fingerprint(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny-random", prompt="def test", max_tokens=8, seed=1)
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.choices[0].finish_reason in ("length", "stop")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.system_fingerprint


def test_chat_answers_with_an_assistant_message(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    reply = client.chat.completions.create(
        model="tiny-random", messages=messages, max_completion_tokens=8, logprobs=True, top_logprobs=2, seed=3
    )
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == reply.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_chat_logprobs_without_top_logprobs_has_empty_lists(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny-random", messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True
    )
    content = reply.choices[0].logprobs.content
    assert [entry.top_logprobs for entry in content] == [[]] * len(content)


def test_streamed_completion_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    options = {
        "model": "tiny-random",
        "prompt": PROMPT,
        "max_tokens": 24,
        "seed": 11,
        "logprobs": 3,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    whole = client.completions.create(**options).choices[0]
    chunks = list(client.completions.create(**options, stream=True))
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for part in parts for item in getattr(part.logprobs, name)]
        assert joined == getattr(whole.logprobs, name), name
    assert parts[0].prompt_token_ids == PROMPT
    assert not hasattr(parts[1], "prompt_token_ids")
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].finish_reason == "length"
    assert parts[-1].seed == whole.seed == 11
    assert chunks[-1].system_fingerprint


def test_streamed_chat_begins_with_the_role_and_adds_up(client: openai.OpenAI) -> None:
    options = {
        "model": "tiny-random",
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": 12,
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    for choice in whole.choices:
        deltas = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert deltas[0].delta.role == "assistant"
        assert deltas[0].delta.content == ""
        assert "".join(part.delta.content for part in deltas) == choice.message.content
        entries = [entry for part in deltas if part.logprobs for entry in part.logprobs.content]
        assert entries == choice.logprobs.content
        assert deltas[-1].finish_reason == choice.finish_reason


@pytest.mark.parametrize("options", [None, {}, {"include_usage": True}, {"continuous_usage_stats": True}])
def test_usage_comes_in_a_stream_only_when_asked_for(client: openai.OpenAI, options: dict[str, bool] | None) -> None:
    extra = {} if options is None else {"stream_options": options}
    chunks = list(client.completions.create(model="tiny-random", prompt=PROMPT, max_tokens=4, stream=True, **extra))
    asked = options or {}
    last = chunks[-1]
    if asked.get("include_usage"):
        assert last.choices == []
        assert last.usage.prompt_tokens == len(PROMPT)
        assert all(chunk.usage is None for chunk in chunks[:-1])
    elif asked.get("continuous_usage_stats"):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert all(chunk.choices for chunk in chunks)
    else:
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_prompts_are_prompt_major_and_n_samples_equal_n_requests_with_the_reported_seeds(client: openai.OpenAI) -> None:
    prompts = [PROMPT, [7, 7, 7], [300, 2, 9, 40]]
    body = {"return_token_ids": True, "prompt_logprobs": 0}
    reply = client.completions.create(
        model="tiny-random", prompt=prompts, n=3, max_tokens=10, seed=21, logprobs=1, extra_body=body
    )
    assert [choice.index for choice in reply.choices] == list(range(9))
    assert [choice.prompt_token_ids for choice in reply.choices[::3]] == prompts
    assert reply.usage.prompt_tokens == sum(map(len, prompts))
    assert reply.usage.completion_tokens == sum(len(choice.token_ids) for choice in reply.choices)
    for choice in reply.choices:
        alone = client.completions.create(
            model="tiny-random",
            prompt=choice.prompt_token_ids,
            max_tokens=10,
            seed=choice.seed,
            logprobs=1,
            extra_body={"return_token_ids": True},
        ).choices[0]
        assert alone.token_ids == choice.token_ids
        assert alone.text == choice.text
        assert len(choice.prompt_logprobs) == len(choice.prompt_token_ids)
        assert choice.prompt_logprobs[0] is None


def test_seeds_decide_and_unseeded_samples_differ_and_report_their_seed(client: openai.OpenAI) -> None:
    def sample(**options: object) -> list[tuple[str, int]]:
        reply = client.completions.create(model="tiny-random", prompt=PROMPT, max_tokens=16, **options)
        return [(choice.text, choice.seed) for choice in reply.choices]

    assert sample(seed=7) == sample(seed=7)
    assert sample(seed=7) != sample(seed=8)
    group = sample(n=8)
    assert len({text for text, _ in group}) == 8
    assert len({seed for _, seed in group}) == 8
    text, seed = group[3]
    assert sample(seed=seed) == [(text, seed)]


def test_logprobs_survive_json_as_float32(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny-random", prompt=PROMPT, max_tokens=16, logprobs=20, seed=2)
    logprobs = reply.choices[0].logprobs
    assert len(bits(logprobs.token_logprobs)) == reply.usage.completion_tokens
    for table, value in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True):
        bits(list(table.values()))
        assert len(table) in (20, 21)
        assert next(iter(table.values())) == value


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, max_tokens: int) -> None:
    body = {"return_token_ids": True}
    reply = client.completions.create(
        model="tiny-random", prompt=[90, 91, 92], echo=True, logprobs=1, max_tokens=max_tokens, extra_body=body
    )
    choice, logprobs = reply.choices[0], reply.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 3 + max_tokens
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    bits(logprobs.token_logprobs[1:])
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert reply.usage.completion_tokens == max_tokens == len(choice.token_ids)
    assert choice.text.startswith("".join(logprobs.tokens[:3]))


def test_streamed_echo_equals_the_whole_one(client: openai.OpenAI) -> None:
    options = {"model": "tiny-random", "prompt": "ab", "echo": True, "logprobs": 2, "max_tokens": 6, "seed": 9, "n": 2}
    whole = client.completions.create(**options).choices
    chunks = list(client.completions.create(**options, stream=True))
    for choice in whole:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert choice.text.startswith("ab")
        assert [v for part in parts for v in part.logprobs.token_logprobs] == choice.logprobs.token_logprobs
        assert [v for part in parts for v in part.logprobs.text_offset] == choice.logprobs.text_offset


def test_prompt_logprobs_name_the_prompt_token_first(client: openai.OpenAI) -> None:
    body = {"prompt_logprobs": 2}
    reply = client.completions.create(model="tiny-random", prompt=PROMPT, max_tokens=1, extra_body=body)
    entries = reply.choices[0].prompt_logprobs
    assert entries[0] is None
    assert len(entries) == len(PROMPT)
    for token, entry in zip(PROMPT[1:], entries[1:], strict=True):
        assert next(iter(entry)) == str(token)
        assert len(entry) in (2, 3)
        ranks = [record["rank"] for record in entry.values()]
        assert {1, 2} <= set(ranks) | {ranks[0]}
        bits([record["logprob"] for record in entry.values()])


def test_tokens_as_ids_are_spelled_by_id(client: openai.OpenAI) -> None:
    body = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    reply = client.completions.create(
        model="tiny-random", prompt=PROMPT, max_tokens=5, logprobs=2, seed=4, extra_body=body
    )
    choice = reply.choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert all(key.startswith("token_id:") for table in choice.logprobs.top_logprobs for key in table)


def test_models_can_be_listed_and_retrieved(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["tiny-random"]
    assert client.models.retrieve("tiny-random").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_generation_are_status_errors_even_for_streams(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="x", stream=stream)
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as overflow:
        client.completions.create(model="tiny-random", prompt=[5] * 513, stream=stream)
    assert "maximum context length is 512 tokens" in overflow.value.message
    assert "513 input tokens" in overflow.value.message
    assert overflow.value.param == "input_tokens"


def test_request_ids_are_echoed_and_may_repeat(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "request_id": "same", "seed": 1}
    first = http.post("/v1/completions", json=body, headers={"x-request-id": "abc-1"})
    second = http.post("/v1/completions", json=body)
    assert first.headers["x-request-id"] == "abc-1"
    assert second.headers["x-request-id"]
    assert first.json()["id"] == second.json()["id"] == "cmpl-same"
    assert first.json()["choices"] == second.json()["choices"]
