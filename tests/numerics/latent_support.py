"""Sequences in a compressed cache, for the tests of the kernels that attend to one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aok_support import awkward
from tokenspeed_kernels_aok.cpu import mla

Spans = dict[int, tuple[int, int]]
"""Sequence -> its queries [begin, end) in one call."""


class LatentSequences:
    """Contexts of the given lengths in shuffled pages of a cache whose unwritten slots are NaN.

    Every token is a query too, of `heads` heads; entries have `c` features, of which the first `r` are summed.
    """

    def __init__(
        self, dtype: torch.dtype, lengths: list[int], *, heads: int, c: int, r: int, kind: str = "normal", seed: int = 0
    ):
        self.dtype, self.lengths, self.heads, self.latent = dtype, lengths, heads, r
        self.entries = [awkward(kind, n, c, dtype=dtype, seed=seed + i) for i, n in enumerate(lengths)]
        self.queries = [awkward(kind, n, heads, c, dtype=dtype, seed=50 + seed + i) for i, n in enumerate(lengths)]
        pages = sum(-(-n // 16) for n in lengths) + 3
        self.cache = torch.full((pages, 16, 1, c), torch.nan, dtype=dtype)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables: list[list[int]] = []
        for entries in self.entries:
            table = [order.pop() for _ in range(-(-len(entries) // 16))]
            slots = torch.tensor([table[i // 16] * 16 + i % 16 for i in range(len(entries))])
            mla.write_latent(entries, self.cache, slots)
            self.tables.append(table)

    def where(self, spans: Spans) -> list[torch.Tensor]:
        """query_starts, context_lens and page_tables for the queries of some sequences."""
        width = max(len(self.tables[b]) for b in spans)
        starts = np.cumsum([0, *(end - begin for begin, end in spans.values())])
        tables = [(self.tables[b] + [10**6] * width)[:width] for b in spans]
        return [torch.tensor(x, dtype=torch.int32) for x in (starts, [end for _, end in spans.values()], tables)]


def rows_of(values: Sequence[torch.Tensor], spans: Spans) -> torch.Tensor:
    """Of each sequence's rows, those of its queries, one after another."""
    return torch.cat([values[b][begin:end] for b, (begin, end) in spans.items()])


def by_sequence(found: torch.Tensor, spans: Spans) -> list[torch.Tensor]:
    """The opposite of `rows_of`."""
    return list(found.split([end - begin for begin, end in spans.values()]))
