"""Which full pages hold the KV of which token prefix, and which of them may be thrown away.

Knows page numbers and token ids; does not know requests, reference counts or tensors.

A full page is known by a *chain key*: SHA-256 over the parent page's key and this page's 16 token ids, and at the root
over the weight version. A key therefore names the whole prefix and the weights that made its KV. Keys are compared in
full (32 bytes): serving wrong KV would need a SHA-256 collision.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

from tokenspeed.kernels.operators import PAGE_SIZE

ChainKey = bytes


def root_key(weight_version: str) -> ChainKey:
    """The parent key of every first page computed with these weights."""
    return hashlib.sha256(b"tokenspeed prefix 1\0" + weight_version.encode()).digest()


def child_key(parent: ChainKey, page_tokens: np.ndarray) -> ChainKey:
    """The key of the page that holds `page_tokens` (int64[16]) after the prefix `parent`."""
    return hashlib.sha256(parent + page_tokens.tobytes()).digest()


def chain_keys(root: ChainKey, tokens: np.ndarray, known: list[ChainKey]) -> list[ChainKey]:
    """Extend `known` (the keys of the first pages of `tokens`, changed in place) to every full page of `tokens`."""
    for page in range(len(known), len(tokens) // PAGE_SIZE):
        parent = known[-1] if known else root
        known.append(child_key(parent, tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]))
    return known


class PrefixCache:
    """Key to page, and the pages that nobody uses in the order in which they were last used."""

    def __init__(self) -> None:
        self._page_of: dict[ChainKey, int] = {}
        self._key_of: dict[int, ChainKey] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    @property
    def idle_pages(self) -> int:
        """Published pages that nobody uses: each can be evicted."""
        return len(self._idle)

    def match(self, keys: list[ChainKey]) -> list[int]:
        """Pages of the longest published prefix of `keys`. Changes nothing."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, key: ChainKey, page: int) -> None:
        """State that `page` (in use, full, computed) holds the KV of `key`; a key that is taken keeps its page."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, page: int) -> None:
        """Take a page out of the index."""
        self._page_of.pop(self._key_of.pop(page))
        self._idle.pop(page, None)

    def mark_idle(self, page: int) -> None:
        """The last user of a published page has gone; it becomes the most recently used idle page."""
        self._idle[page] = None

    def mark_used(self, page: int) -> None:
        """An idle page has a user again; a page in use is left as it is."""
        self._idle.pop(page, None)

    def evict(self) -> int | None:
        """Forget the idle page that was used longest ago and return it, or None when no page is idle."""
        if not self._idle:
            return None
        page, _ = self._idle.popitem(last=False)
        self._page_of.pop(self._key_of.pop(page))
        return page

    def clear(self) -> list[int]:
        """Forget every key; return the pages that were idle, which now belong to nobody."""
        freed = list(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()
        return freed
