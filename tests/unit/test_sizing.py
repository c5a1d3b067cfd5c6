"""Sizes: defaults that always fit, and refusals for given sizes that cannot."""

from __future__ import annotations

import pytest

from tokenspeed.config_sources import load_config
from tokenspeed.machine import Machine
from tokenspeed.sizing import DEFAULT_KV_BYTES, Sizes, choose_sizes

GIB = 1 << 30
MACHINE = Machine(memory_bytes=64 * GIB)
PAGE = 1 << 20


def sizes(machine: Machine = MACHINE, max_positions: int = 1 << 20, page: int = PAGE, **options: object) -> Sizes:
    found, problems = choose_sizes(
        load_config(options, environ={}), machine, max_positions=max_positions, bytes_per_page=page
    )
    assert problems == ()
    return found


def problem(max_positions: int = 4096, **options: object) -> str:
    config = load_config(options, environ={})
    (found,) = choose_sizes(config, MACHINE, max_positions=max_positions, bytes_per_page=PAGE)[1]
    assert found.kind == "size"
    return found.summary


def test_the_default_takes_no_more_than_could_be_used() -> None:
    found = sizes(max_positions=64, max_num_seqs=10)
    assert (found.num_pages, found.max_model_len) == (10 * 4, 64)


def test_the_default_is_bounded_by_a_share_of_the_machine() -> None:
    assert sizes().num_pages == DEFAULT_KV_BYTES // PAGE
    assert sizes(Machine(memory_bytes=4 * GIB)).num_pages == GIB // PAGE


def test_a_small_cache_bounds_the_context_unless_the_context_was_given() -> None:
    assert sizes(num_kv_pages=3).max_model_len == 48
    assert sizes(kv_cache_memory=5 * PAGE).num_pages == 5
    assert problem(num_kv_pages=3, max_model_len=64) == (
        "--max-model-len 64 needs 0.00 GiB of KV cache, and there are 0.00 GiB (48 tokens)"
    )


def test_a_context_longer_than_the_models_is_refused() -> None:
    assert problem(max_model_len=5000) == (
        "--max-model-len 5000 was given, and the model's longest context is 4096 tokens"
    )


def test_a_cache_without_a_page_is_refused() -> None:
    assert problem(kv_cache_memory=1000) == ("the KV cache has no page: one page of 16 tokens takes 1048576 bytes")


def test_a_cache_larger_than_the_machine_is_refused() -> None:
    config = load_config({"num_kv_pages": 70_000}, environ={})
    (found,) = choose_sizes(config, MACHINE, max_positions=4096, bytes_per_page=PAGE)[1]
    assert found.kind == "memory"
    assert found.summary == ("a KV cache of 70000 pages takes 68.36 GiB, and this machine has 64.00 GiB of memory")


@pytest.mark.parametrize(
    ("given", "seats", "budget"),
    [
        ({}, 256, 2048),
        ({"max_num_batched_tokens": 8}, 8, 8),
        ({"max_num_batched_tokens": 4096}, 256, 4096),
        ({"max_num_seqs": 4000}, 4000, 4000),
        ({"max_num_seqs": 8}, 8, 2048),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 8}, 8, 8),
    ],
)
def test_a_default_gives_way_to_what_was_given(given: dict[str, object], seats: int, budget: int) -> None:
    found = sizes(**given)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (seats, budget)


def test_more_requests_than_tokens_are_refused() -> None:
    """Even with the default's value, when that was given."""
    for seats, budget in ((9, 8), (256, 255)):
        assert problem(max_num_seqs=seats, max_num_batched_tokens=budget) == (
            f"--max-num-seqs {seats} and --max-num-batched-tokens {budget} were given, and each request that runs "
            "takes a token of every step"
        )
