"""The pool of KV pages: who owns each page, and the tensors behind them.

Page-ownership table. A page is in exactly one state; every arrow is a method of `KVCache`.

    state       references  in index  next states
    free        0           no        owned (`allocate`)
    owned       1           no        shared (`publish`, when full and computed), free (`release`)
    shared      >= 1        yes       more or fewer references (`acquire`, `release`), idle (`release` of the last)
    idle        0           yes       shared (`acquire`), owned (`allocate` evicts the least recently used)

Only the one owner of an *owned* page ever writes to it; a *shared* page is full and never written again, so nothing
that a request does can change what another one reads. `free + idle + pages with references = num_pages` always.

Page tables live in one preallocated int32 matrix, a row for each seat, written only where pages are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from tokenspeed import huge_pages
from tokenspeed.engine.prefix_cache import ChainKey, PrefixCache
from tokenspeed.kernels.operators import PAGE_SIZE


class KVSpecLike(Protocol):
    """What a model says of one layer's cache (`tokenspeed.models.base.KVSpec`)."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


def bytes_per_page(specs: Sequence[KVSpecLike]) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    return sum(PAGE_SIZE * spec.num_kv_heads * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize for spec in specs)


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // PAGE_SIZE)


class KVCache:
    """`num_pages` pages for every layer; `max_seats` rows of page tables, each `max_pages_per_seat` wide."""

    def __init__(
        self,
        specs: Sequence[KVSpecLike],
        num_pages: int,
        *,
        max_seats: int,
        max_pages_per_seat: int,
        device: torch.device | str = "cpu",
    ) -> None:
        # Zeroed, so that no kernel can meet a NaN in a slot that was never written.
        zeros = huge_pages.zeros if torch.device(device).type == "cpu" else partial(torch.zeros, device=device)
        self.tensors = [
            (
                zeros(num_pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype),
                zeros(num_pages, PAGE_SIZE, spec.num_kv_heads, spec.value_dim, dtype=spec.dtype),
            )
            for spec in specs
        ]
        self.num_pages = num_pages
        self.page_tables = np.zeros((max_seats, max_pages_per_seat), dtype=np.int32)
        self._index = PrefixCache()
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now: free ones and idle ones."""
        return len(self._free) + self._index.idle_pages

    @property
    def used(self) -> int:
        """Pages that some request references."""
        return self.num_pages - self.available

    @property
    def idle(self) -> int:
        """Pages that nobody references but that can still serve a prefix."""
        return self._index.idle_pages

    def references(self, page: int) -> int:
        """How many requests reference `page`."""
        return self._references[page]

    def allocate(self, count: int) -> list[int] | None:
        """`count` owned pages, or None (and nothing changed) when so many are not available."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._index.evict()
            assert page is not None
            self._references[page] = 1
            pages.append(page)
        return pages

    def match(self, keys: list[ChainKey]) -> list[int]:
        """Pages that hold the longest cached prefix of `keys`; call `acquire` before allocating anything."""
        return self._index.match(keys)

    def idle_among(self, pages: list[int]) -> int:
        """How many of `pages` have no user, so that acquiring them lowers `available`."""
        return sum(self._references[page] == 0 for page in pages)

    def acquire(self, pages: list[int]) -> None:
        """Add a reference to each of these shared or idle pages."""
        for page in pages:
            self._references[page] += 1
            self._index.mark_used(page)

    def publish(self, key: ChainKey, page: int) -> None:
        """Offer a full, computed page of a request to others under its chain key."""
        self._index.publish(key, page)

    def release(self, pages: list[int]) -> None:
        """Drop one reference of each page; the last of `pages` becomes the first candidate for eviction."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._index:
                    self._index.mark_idle(page)
                else:
                    self._free.append(page)

    def discard(self, pages: list[int]) -> None:
        """Release pages whose contents are not to be trusted (NaN): unpublished, and zeroed where nobody else reads."""
        for page in pages:
            if page in self._index:
                self._index.forget(page)
        self.release(pages)
        if orphans := [page for page in pages if self._references[page] == 0]:
            for keys, values in self.tensors:
                keys[orphans] = 0
                values[orphans] = 0

    def forget_prefixes(self) -> None:
        """Empty the prefix index; pages in use stay with their users, who free them as unpublished pages."""
        self._free.extend(self._index.clear())

    def set_page_table(self, seat: int, start: int, pages: list[int]) -> None:
        """Write `pages` into the table of `seat` from page index `start` on."""
        self.page_tables[seat, start : start + len(pages)] = pages
