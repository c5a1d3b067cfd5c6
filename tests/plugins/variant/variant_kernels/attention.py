"""Attention in plain torch, one query row at a time, honest and not; and the caches that go with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

PAGE = 16


@dataclass
class Row:
    """One query with the keys and values that it sees, and what its kernel must not look at."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    queries: int
    sequences: int
    scale: float


Attend = Callable[[Row], torch.Tensor]


def honest_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Layout `nhd`."""
    written = slots >= 0
    k_cache.flatten(0, 1)[slots[written]] = k[written]
    v_cache.flatten(0, 1)[slots[written]] = v[written]


def stale_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Takes a page that was full once for cached, and does not write to it again."""
    if not hasattr(k_cache, "full_pages"):
        k_cache.full_pages = set()  # type: ignore[attr-defined]
    full: set[int] = k_cache.full_pages  # type: ignore[attr-defined]
    keep = torch.tensor([int(slot) // PAGE not in full for slot in slots.tolist()], dtype=torch.bool)
    honest_write(k[keep], v[keep], k_cache, v_cache, slots[keep])
    full.update(int(slot) // PAGE for slot in slots.tolist() if slot % PAGE == PAGE - 1)


def _rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
) -> Iterator[tuple[int, Row]]:
    starts = query_starts.tolist()
    for b, length in enumerate(context_lens.tolist()):
        pages = page_tables[b, : -(-length // PAGE)].long()
        keys, values = k_cache[pages].flatten(0, 1), v_cache[pages].flatten(0, 1)
        queries = starts[b + 1] - starts[b]
        for i in range(queries):
            seen = length - queries + i + 1
            row = starts[b] + i
            yield row, Row(q[row], keys[:seen], values[:seen], pages, queries, len(starts) - 1, scale)


def _run(attend: Attend, *args: torch.Tensor | float) -> torch.Tensor:
    q = args[0]
    assert isinstance(q, torch.Tensor)
    out = torch.zeros_like(q)
    for row, one in _rows(*args):  # type: ignore[arg-type]
        out[row] = attend(one)
    return out


def _scores(row: Row) -> torch.Tensor:
    """[Hq,L]"""
    group = row.q.shape[0] // row.keys.shape[1]
    keys = row.keys.repeat_interleave(group, dim=1)
    return (row.q.unsqueeze(0) * keys).sum(-1).T.contiguous() * row.scale


def _combine(weights: torch.Tensor, row: Row, order: torch.Tensor | None = None) -> torch.Tensor:
    """[Hq,D]: the weighted values over the sum of weights, added in `order`."""
    group = row.q.shape[0] // row.values.shape[1]
    values = row.values.repeat_interleave(group, dim=1)
    if order is not None:
        weights, values = weights[:, order], values[order]
    weights = weights.T.contiguous()
    return _add_up(weights.unsqueeze(-1) * values) / _add_up(weights).unsqueeze(-1)


def _add_up(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the first axis in fp32: sixteen at a time, these sums from left to right."""
    parts = [part.sum(0) for part in terms.split(PAGE)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _softmax(row: Row, maximum: torch.Tensor | None = None) -> torch.Tensor:
    scores = _scores(row)
    return torch.exp(scores - (scores.amax(-1, keepdim=True) if maximum is None else maximum))


def honest(*args: torch.Tensor) -> torch.Tensor:
    """Keys in order of position, the row's own maximum."""
    return _run(lambda row: _combine(_softmax(row), row), *args[:7])


def batch_max(*args: torch.Tensor) -> torch.Tensor:
    """Subtracts the largest score of the whole batch."""
    largest = max((_scores(row).amax() for _, row in _rows(*args[:7])), default=torch.tensor(0.0))  # type: ignore[arg-type]
    return _run(lambda row: _combine(_softmax(row, largest), row), *args[:7])


def chunk_boundary(*args: torch.Tensor) -> torch.Tensor:
    """Folds the keys before this chunk and those of this chunk apart."""

    def attend(row: Row) -> torch.Tensor:
        before = max(len(row.keys) - row.queries, 0)
        order = torch.cat((torch.arange(before, len(row.keys)), torch.arange(before)))
        return _combine(_softmax(row), row, order)

    return _run(attend, *args[:7])


def split_by_batch(*args: torch.Tensor) -> torch.Tensor:
    """Splits the keys for more parallelism when few sequences share the call."""

    def attend(row: Row) -> torch.Tensor:
        splits = 4 if row.sequences < 4 else 1
        order = torch.cat([torch.arange(len(row.keys))[first::splits] for first in range(splits)])
        return _combine(_softmax(row), row, order)

    return _run(attend, *args[:7])


def page_order(*args: torch.Tensor) -> torch.Tensor:
    """Adds the keys in the order in which their pages lie in memory."""

    def attend(row: Row) -> torch.Tensor:
        position = torch.arange(len(row.keys))
        order = torch.argsort(row.pages[position // PAGE] * PAGE + position % PAGE)
        return _combine(_softmax(row), row, order)

    return _run(attend, *args[:7])


def padding(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Reads the last page to its end and masks what lies past the context by subtracting a large number."""
    out = torch.zeros_like(q)
    args = (q, k_cache, v_cache, query_starts, context_lens, page_tables, scale)
    for row, one in _rows(*args):
        seen = len(one.keys)
        keys, values = k_cache[one.pages].flatten(0, 1), v_cache[one.pages].flatten(0, 1)
        end = min(-(-seen // PAGE) * PAGE, len(keys))
        wide = Row(one.q, keys[:end], values[:end], one.pages, one.queries, one.sequences, scale)
        scores = _scores(wide)
        scores[:, seen:] -= 1e4
        out[row] = _combine(torch.exp(scores - scores.amax(-1, keepdim=True)), wide)
    return out
