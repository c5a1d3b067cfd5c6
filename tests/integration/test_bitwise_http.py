"""The promises of `rl-bitwise`, as an HTTP client sees them on the embedded model: equal bits, however it is asked."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

PROMPT = "One day, a shy fox"
ASK = {"max_tokens": 48, "seed": 1234, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}

Bits = tuple[tuple[int, ...], tuple[bytes, ...]]


@pytest.fixture(scope="module")
def bitwise(start_server: Any) -> Iterator[Any]:
    """No MODEL and the envelope: what the README's first command starts."""
    with start_server("--numerics", "rl-bitwise", "--enable-prefix-caching", model=None) as server:
        yield server


def bits(choice: dict[str, Any]) -> Bits:
    """Token ids and the bytes of the float32 logprobs."""
    values = choice["logprobs"]["token_logprobs"]
    return tuple(choice["token_ids"]), tuple(struct.pack("<f", value) for value in values)


def complete(server: Any, **more: Any) -> dict[str, Any]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        reply = http.post("/v1/completions", json={"prompt": PROMPT, **ASK, **more})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def one(server: Any, **more: Any) -> Bits:
    return bits(complete(server, **more)["choices"][0])


def test_alone_again_and_in_a_crowd_the_bits_are_equal(bitwise: Any) -> None:
    with httpx.Client(base_url=bitwise.url) as http:
        http.post("/reset_prefix_cache")
    alone = one(bitwise)
    assert complete(bitwise)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # too short for a page
    assert one(bitwise) == alone
    assert one(bitwise, seed=1235) != alone
    with ThreadPoolExecutor(24) as pool:
        noise = [
            pool.submit(complete, bitwise, prompt=[50 + i] * (5 + 13 * i), seed=i, temperature=1.3) for i in range(16)
        ]
        crowded = [pool.submit(one, bitwise) for _ in range(8)]
        assert {future.result() for future in crowded} == {alone}
        assert len({bits(future.result()["choices"][0]) for future in noise}) == 16


def test_a_cached_prefix_changes_no_bit(bitwise: Any) -> None:
    prompt = [(17 * i) % 200 + 20 for i in range(200)]
    cold, warm = complete(bitwise, prompt=prompt), complete(bitwise, prompt=prompt)
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (cold, warm)]
    assert cached == [0, 192]
    assert bits(cold["choices"][0]) == bits(warm["choices"][0])


def test_every_route_and_the_stream_agree(bitwise: Any) -> None:
    alone = one(bitwise)
    with httpx.Client(base_url=bitwise.url, timeout=120) as http:
        ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        sampling = {"max_new_tokens": 48, "sampling_seed": 1234, "ignore_eos": True}
        native = http.post("/generate", json={"input_ids": ids, "sampling_params": sampling, "return_logprob": True})
        entries = native.json()["meta_info"]["output_token_logprobs"]
        assert tuple(entry[1] for entry in entries) == alone[0]
        assert tuple(struct.pack("<f", entry[0]) for entry in entries) == alone[1]
        text = http.post("/v1/completions", json={"prompt": PROMPT, **ASK, "stream": True}).text
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
        choices = [event["choices"][0] for event in events]
        streamed = [pair for choice in choices for pair in zip(*bits(choice), strict=True)]
        assert streamed == list(zip(*alone, strict=True))


def test_arrays_in_base64_hold_the_same_bits(bitwise: Any) -> None:
    """On every route, whole and streamed; NaN stands for the first token of a prompt, which has no logprob."""
    alone = one(bitwise)
    encoded = {"logprobs_encoding": "base64"}
    with httpx.Client(base_url=bitwise.url, timeout=120) as http:

        def post(path: str, **body: Any) -> Any:
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        ids = post("/tokenize", prompt=PROMPT)["tokens"]
        plain = one(bitwise, prompt=ids)
        scored = complete(bitwise, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"][1:]
        expected = b"".join(struct.pack("<f", next(iter(entry.values()))["logprob"]) for entry in scored)
        missing = struct.pack("<f", math.nan)
        choice = complete(bitwise, **encoded, prompt_logprobs=0, echo=True)["choices"][0]
        assert base64.b64decode(choice["prompt_logprobs"]) == missing + expected
        assert base64.b64decode(choice["logprobs"]["token_logprobs"]) == missing + expected + b"".join(alone[1])

        stream = http.post("/v1/completions", json={"prompt": PROMPT, **ASK, **encoded, "stream": True}).text
        events = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n")[:-2]]
        arrays = [event["choices"][0]["logprobs"]["token_logprobs"] for event in events]
        assert b"".join(map(base64.b64decode, arrays)) == b"".join(alone[1])

        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 5, "logprobs": True}
        content = post("/v1/chat/completions", **chat)["choices"][0]["logprobs"]["content"]
        values = [entry["logprob"] for entry in content]
        array = post("/v1/chat/completions", **chat, **encoded)["choices"][0]["logprobs"]["token_logprobs"]
        assert base64.b64decode(array) == struct.pack(f"<{len(values)}f", *values)

        tokens = {"seed": 1234, "max_tokens": 48, "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True}
        found = post("/inference/v1/generate", token_ids=ids, sampling_params={**tokens, **encoded})
        assert base64.b64decode(found["choices"][0]["logprobs"]["token_logprobs"]) == b"".join(plain[1])
        assert base64.b64decode(found["prompt_logprobs"]) == missing + expected

        sampling = {"max_new_tokens": 48, "sampling_seed": 1234, "ignore_eos": True}
        native = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        meta = post("/generate", **native, **encoded)["meta_info"]
        assert base64.b64decode(meta["output_token_logprobs"]) == b"".join(plain[1])
        assert base64.b64decode(meta["input_token_logprobs"]) == missing + expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 2}),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "logprob_token_ids": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}),
        ("/generate", {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 1}),
    ],
)
def test_alternatives_have_no_place_in_an_array(bitwise: Any, path: str, body: dict[str, Any]) -> None:
    with httpx.Client(base_url=bitwise.url) as http:
        refused = http.post(path, json={**body, "logprobs_encoding": "base64"})
        unknown = http.post(path, json={**body, "logprobs_encoding": "base65"})
    assert refused.status_code == unknown.status_code == 400
    assert refused.json()["error"]["param"] == "logprobs_encoding"
    assert unknown.json()["error"]["param"] == "logprobs_encoding"


def test_replies_name_the_weights_from_the_start(bitwise: Any) -> None:
    with httpx.Client(base_url=bitwise.url, timeout=120) as http:
        certificate = http.get("/numerics").json()["certificate"]
        version = http.get("/get_weight_version").json()["weight_version"]
        meta = http.post("/generate", json={"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}).json()
    assert version == certificate["bits"]["weights"]["sha256"][:12]
    assert meta["meta_info"]["weight_version"] == version
    (choice,) = complete(bitwise, return_weight_versions=True)["choices"]
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 48}]


def test_output_logprobs_are_the_prompt_logprobs_of_the_same_tokens(bitwise: Any) -> None:
    with httpx.Client(base_url=bitwise.url, timeout=120) as http:
        ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    for temperature in (1.0, 0.6):
        tokens, logprobs = one(bitwise, prompt=ids, temperature=temperature)
        scored = complete(
            bitwise, prompt=[*ids, *tokens], max_tokens=0, echo=True, temperature=temperature, ignore_eos=False
        )
        values = scored["choices"][0]["logprobs"]["token_logprobs"][len(ids) :]
        assert tuple(struct.pack("<f", value) for value in values) == logprobs


def test_n_samples_are_n_requests_with_the_reported_seeds(bitwise: Any) -> None:
    group = complete(bitwise, n=6)["choices"]
    assert len({bits(choice) for choice in group}) == 6
    for choice in group:
        assert one(bitwise, seed=choice["seed"]) == bits(choice)
