"""Reported log-probabilities: of sampled tokens, of prompt tokens and of the best alternatives.

One operator serves all of them, so the number for a token is the same whether it was sampled or fed. It describes the
model's own distribution over the whole vocabulary, after temperature (`processed`) or before (`raw`); penalties, masks
and kept sets are no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenspeed.engine.request import PositionLogprobs, TokenLogprob
from tokenspeed.engine.sampler import SamplingOperators

PROMPT_ROWS_AT_ONCE = 64
"""Rows of prompt logits that exist at one time: 64 rows of a 152k vocabulary take 19 MB in bf16."""


class Logprobs:
    """Computes `PositionLogprobs`. `raw` reports the distribution before temperature."""

    def __init__(self, operators: SamplingOperators, *, raw: bool) -> None:
        self._operators = operators
        self._raw = raw

    def of(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        tops: Sequence[int],
        extras: Sequence[Sequence[int]],
        temperature: torch.Tensor,
    ) -> list[PositionLogprobs]:
        """One entry for each row of `logits` ([R, V], model dtype).

        `tokens[r]` is the actual token of row r, `tops[r]` how many best tokens to report (-1: all), `extras[r]`
        further ids to report after them, `temperature` float32[R].
        """
        if self._raw:
            temperature = torch.ones_like(temperature)
        best = best_tokens(logits, tops)
        columns = [[token, *top, *extra] for token, top, extra in zip(tokens, best, extras, strict=True)]
        width = max(map(len, columns))
        ids = torch.tensor([ids + [-1] * (width - len(ids)) for ids in columns], dtype=torch.int64)
        ids = ids.to(logits.device)
        operators = self._operators
        values = operators.logprobs(logits, ids, temperature, operators.order, operators.block).tolist()
        actual_ranks = ranks(logits, ids[:, 0])
        return [
            PositionLogprobs(
                TokenLogprob(token, row[0], rank),
                [TokenLogprob(i, value, place) for place, (i, value) in enumerate(zip(top, row[1:], strict=False), 1)]
                + self._extras(logits[r], extra, row[1 + len(top) :]),
            )
            for r, (token, row, rank, top, extra) in enumerate(
                zip(tokens, values, actual_ranks, best, extras, strict=True)
            )
        ]

    def start(
        self, logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values float32[R] and ranks int64[R] of `tokens` (int64[R], -1: none) on their device; waits for nothing."""
        if self._raw:
            temperature = torch.ones_like(temperature)
        operators = self._operators
        values = operators.logprobs(logits, tokens.unsqueeze(-1), temperature, operators.order, operators.block)
        return values[:, 0], _count_ahead(logits, tokens.clamp_min(0)) + 1

    def _extras(self, row: torch.Tensor, ids: Sequence[int], values: Sequence[float]) -> list[TokenLogprob]:
        if not ids:
            return []
        wanted = torch.tensor(ids, dtype=torch.int64, device=row.device)
        places = ranks(row.expand(len(ids), -1), wanted)
        return [TokenLogprob(i, value, place) for i, value, place in zip(ids, values, places, strict=False)]


def best_tokens(logits: torch.Tensor, counts: Sequence[int]) -> list[list[int]]:
    """The `counts[r]` best token ids of each row (-1: all), best first, exact ties by ascending id."""
    vocab = logits.shape[-1]
    counts = [vocab if count < 0 else min(count, vocab) for count in counts]
    widest = max((count for count in counts if count < vocab), default=0)
    values: list[list[float]] = []
    ids: list[list[int]] = []
    if widest:
        # One more than asked for shows whether a tie straddles the cut; `topk` promises nothing about ties.
        top = torch.topk(logits, widest + 1, dim=-1)
        values, ids = top.values.tolist(), top.indices.tolist()
    best: list[list[int]] = []
    for r, count in enumerate(counts):
        if count == 0:
            best.append([])
        elif count == vocab:
            best.append(torch.sort(logits[r], descending=True, stable=True).indices.tolist())
        else:
            best.append(_cut(logits[r], values[r], ids[r], count))
    return best


def _cut(row: torch.Tensor, values: list[float], ids: list[int], count: int) -> list[int]:
    """The best `count` of a row, whose `topk` of more than `count` is given in any order of ties."""
    least = values[count - 1]
    if values[count] == least:
        better = [(value, i) for value, i in zip(values, ids, strict=True) if value > least]
        ties = np.flatnonzero(row.to(torch.float32).numpy(force=True) == least)[: count - len(better)].tolist()
        pairs = better + [(least, i) for i in ties]
    else:
        pairs = list(zip(values[:count], ids[:count], strict=True))
    return [i for _, i in sorted(pairs, key=lambda pair: (-pair[0], pair[1]))]


def ranks(logits: torch.Tensor, ids: torch.Tensor) -> list[int]:
    """Place of `ids[r]` (int64[R]) among the tokens of row r: 1 is the best, exact ties by ascending id.

    Ahead of a token are those before it that are at least as good and those after it that are better.
    """
    if logits.is_cuda:
        counts: list[int] = (_count_ahead(logits, ids) + 1).tolist()
        return counts
    mine = logits.gather(-1, ids.unsqueeze(-1))
    # On a CPU, torch would wake its threads for every row, and count booleans by widening each to 64 bits.
    places = []
    for row, value, token in zip(logits.to(torch.float32).numpy(), mine[:, 0].tolist(), ids.tolist(), strict=True):
        not_worse = np.count_nonzero(row[:token] >= value)
        places.append(1 + int(not_worse) + int(np.count_nonzero(row[token + 1 :] > value)))
    return places


def _count_ahead(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """How many tokens of row r stand before `ids[r]`, int64[R], without leaving the device."""
    mine = logits.gather(-1, ids.unsqueeze(-1))
    before = torch.arange(logits.shape[-1], device=logits.device) < ids.unsqueeze(-1)
    return torch.where(before, logits >= mine, logits > mine).sum(-1)
