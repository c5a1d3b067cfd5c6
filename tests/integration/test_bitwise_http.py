"""The promises of `rl-bitwise`, as an HTTP client sees them on the embedded model: equal bits, however it is asked."""

from __future__ import annotations

import json
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
