"""What the kernels over a paged cache share: the sequences of a call, and what native code finds wrong with them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed_kernels_aok.cpu.arguments import same_dtype, unit_stride


class Sequences(NamedTuple):
    """The B sequences of a call, as native code reads them: `query_starts` int32[B+1], `context_lens` int32[B] and
    `page_tables` int32[B,W]."""

    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


def read_sequences(query_starts: torch.Tensor, context_lens: torch.Tensor, page_tables: torch.Tensor) -> Sequences:
    """Raises TypeError for other dtypes, ValueError for shapes that do not fit together."""
    for what, tensor in (("query_starts", query_starts), ("context_lens", context_lens), ("page_tables", page_tables)):
        same_dtype(what, tensor, torch.int32)
    count = context_lens.shape[0]
    if query_starts.shape != (count + 1,) or page_tables.dim() != 2 or page_tables.shape[0] != count:
        raise ValueError(
            f"query_starts is {list(query_starts.shape)}, page_tables {list(page_tables.shape)}; "
            f"expected {[count + 1]} and {[count, 'W']} for {count} context_lens"
        )
    return Sequences(query_starts.contiguous(), context_lens.contiguous(), unit_stride(page_tables))


def misfit(sequences: Sequences, pages: int, tokens: int) -> ValueError:
    """What the native code found: lengths, pages and queries that contradict each other."""
    return ValueError(
        f"query_starts {sequences.starts.tolist()}, context_lens {sequences.lengths.tolist()} and page_tables "
        f"{list(sequences.tables.shape)} of {pages} pages do not fit together, or not {tokens} queries"
    )


def beyond_cache(slots: torch.Tensor, pages: int) -> ValueError:
    """What the native code found: a slot in no page of the cache."""
    return ValueError(f"slots reach {slots.max().item()}; the cache has {pages * PAGE_SIZE} slots in {pages} pages")


def one_sequence(keys: int, queries: int) -> Sequences:
    """For the self-checks: a sequence of `keys` tokens, the last `queries` of them asked for, its pages in order."""
    starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, queries], [keys]))
    return Sequences(starts, lengths, torch.arange(-(-keys // PAGE_SIZE), dtype=torch.int32).unsqueeze(0))
