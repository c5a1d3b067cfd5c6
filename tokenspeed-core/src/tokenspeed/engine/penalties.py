"""Edits of one row of logits that a request asked for, before sampling: a function of that request's tokens alone.

The order is: allowed ids, `min_tokens` mask, `logit_bias`, repetition penalty, then frequency and presence penalty,
each a single elementwise fp32 operation. They change what is sampled and never what is reported as a log-probability.
"""

from __future__ import annotations

import numpy as np
import torch

_INITIAL_CAPACITY = 64


class TokenCounts:
    """Distinct tokens of a request and how often each was generated (0: it stands in the prompt only).

    Kept in growing arrays so that a step neither walks the tokens again nor builds lists.
    """

    def __init__(self, prompt: list[int]) -> None:
        distinct = sorted(set(prompt))
        self._size = len(distinct)
        capacity = self._size + _INITIAL_CAPACITY
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._index = {token: i for i, token in enumerate(distinct)}

    def add(self, token: int) -> None:
        """Count one generated token."""
        index = self._index.get(token)
        if index is None:
            index = self._index[token] = self._size
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[index] = token
            self._size += 1
        self._counts[index] += 1

    def ids(self) -> np.ndarray:
        """Distinct tokens of prompt and output, int64."""
        return self._ids[: self._size]

    def counts(self) -> np.ndarray:
        """How often each of `ids()` was generated, float32."""
        return self._counts[: self._size]


class LogitsEdit:
    """What one request does to its row, with its constant tensors made once."""

    def __init__(
        self,
        *,
        vocab_size: int,
        device: torch.device | str,
        allowed: list[int] | None,
        bias: dict[int, float] | None,
        masked_until: int,
        masked: list[int],
        repetition: float,
        frequency: float,
        presence: float,
        counts: TokenCounts | None,
    ) -> None:
        self._device = device
        self._forbidden: torch.Tensor | None = None
        if allowed is not None:
            self._forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self._forbidden[torch.tensor(allowed, dtype=torch.int64, device=device)] = False
        self._bias_ids: torch.Tensor | None = None
        if bias:
            self._bias_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
            self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._masked_until = masked_until
        self._masked = torch.tensor(masked, dtype=torch.int64, device=device)
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        self._counts = counts

    def apply(self, row: torch.Tensor, generated: int) -> None:
        """Edit `row` (float32[V]) in place; `generated` tokens were sampled before this one."""
        if self._forbidden is not None:
            row.masked_fill_(self._forbidden, -torch.inf)
        if generated < self._masked_until:
            row[self._masked] = -torch.inf
        if self._bias_ids is not None:
            row[self._bias_ids] += self._bias
        if self._counts is not None:
            self._penalise(row, self._counts)

    def _penalise(self, row: torch.Tensor, counted: TokenCounts) -> None:
        ids = torch.from_numpy(counted.ids()).to(self._device)
        values = row[ids]
        if self._repetition != 1.0:
            values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        if self._frequency or self._presence:
            counts = torch.from_numpy(counted.counts()).to(self._device)
            values = values - self._frequency * counts
            values = values - self._presence * (counts > 0).to(torch.float32)
        row[ids] = values
