"""Pages: each in one state, references that come back to zero, and a prefix that is found only when it is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenspeed.engine.kv_cache import KVCache
from tokenspeed.engine.prefix_cache import ChainKey, PrefixCache, chain_keys, root_key
from tokenspeed.testing.context_model import ContextSpec

TOKENS = np.arange(100, dtype=np.int64)


def cache(pages: int = 6) -> KVCache:
    return KVCache([ContextSpec()], pages, max_seats=2, max_pages_per_seat=pages)


def published(pool: KVCache, count: int) -> tuple[list[ChainKey], list[int]]:
    """The keys of `TOKENS`, and the pages in use that were published under the first `count` of them."""
    keys = chain_keys(root_key(""), TOKENS, [])
    pages = pool.allocate(count)
    assert pages is not None
    for key, page in zip(keys, pages, strict=False):
        pool.publish(key, page)
    return keys, pages


def test_keys_name_the_whole_prefix_and_the_weights() -> None:
    keys = chain_keys(root_key("v1"), TOKENS, [])
    assert len(keys) == 6
    assert len({*keys}) == 6
    assert all(len(key) == 32 for key in keys)
    other = TOKENS.copy()
    other[3] += 1
    assert not set(chain_keys(root_key("v1"), other, [])) & set(keys)
    assert not set(chain_keys(root_key("v2"), TOKENS, [])) & set(keys)
    # The same page of tokens elsewhere in a text is another page of KV.
    twice = np.concatenate((TOKENS[:16], TOKENS[:16]))
    first, second = chain_keys(root_key("v1"), twice, [])
    assert first != second


def test_keys_are_extended_without_starting_again() -> None:
    known = chain_keys(root_key(""), TOKENS[:40], [])
    assert chain_keys(root_key(""), TOKENS, list(known)) == chain_keys(root_key(""), TOKENS, [])


def test_the_least_recently_used_idle_page_is_evicted() -> None:
    index = PrefixCache()
    keys = chain_keys(root_key(""), TOKENS, [])
    for page in range(3):
        index.publish(keys[page], page)
    for page in (1, 0, 2):
        index.mark_idle(page)
    index.mark_used(0)
    index.mark_idle(0)
    assert [index.evict() for _ in range(4)] == [1, 2, 0, None]
    assert index.match(keys) == []


def test_a_taken_key_keeps_its_page() -> None:
    index = PrefixCache()
    (key,) = chain_keys(root_key(""), TOKENS[:16], [])
    index.publish(key, 4)
    index.publish(key, 5)
    assert index.match([key]) == [4]
    assert 5 not in index


def test_pages_go_round() -> None:
    pool = cache()
    keys, first = published(pool, 3)
    assert pool.match(keys) == first
    pool.acquire(first[:2])
    pool.release(first)
    assert [pool.references(page) for page in first] == [1, 1, 0]
    assert (pool.used, pool.idle, pool.available) == (2, 1, 4)
    assert pool.allocate(5) is None
    assert (pool.used, pool.idle, pool.available) == (2, 1, 4)
    assert pool.allocate(4) is not None
    assert pool.match(keys) == first[:2]
    pool.release(first[:2])
    # The tail of a chain goes before its beginning.
    assert pool.allocate(1) == [first[1]]
    assert pool.match(keys) == first[:1]


def test_discarded_pages_are_forgotten_and_zeroed() -> None:
    pool = cache()
    keys, pages = published(pool, 2)
    pool.tensors[0][0][pages] = torch.nan
    pool.discard(pages)
    assert pool.match(keys) == []
    assert (pool.used, pool.idle) == (0, 0)
    assert not pool.tensors[0][0].isnan().any()


@pytest.mark.parametrize("idle", [True, False])
def test_forgetting_prefixes_leaves_pages_in_use(idle: bool) -> None:
    pool = cache()
    keys, pages = published(pool, 2)
    if idle:
        pool.release(pages)
    pool.forget_prefixes()
    assert pool.match(keys) == []
    assert pool.used == (0 if idle else 2)
    if not idle:
        pool.release(pages)
    assert (pool.used, pool.idle, pool.available) == (0, 0, 6)
