"""A model without kernels whose logits depend on every token of the context, read back from the KV cache.

It makes a fault of the engine visible at once: a wrong page, slot, position or chunk changes the logits entirely. It
is all integer arithmetic, so equal contexts give equal bits on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.kernels.operators import PAGE_SIZE

# A Mersenne prime and two multipliers below it: a polynomial hash whose terms stay inside int64.
_PRIME = (1 << 31) - 1
_TOKEN, _POSITION = 48271, 69621


@dataclass(frozen=True)
class ContextSpec:
    """One layer that caches one number for each token, as a float64 so that it is exact."""

    num_kv_heads: int = 1
    head_dim: int = 1
    value_dim: int = 1
    dtype: torch.dtype = torch.float64


class ContextModel:
    """`vocab_size` logits in float32 from a hash of the context.

    `favour` may return logits of its own for a context (int64 token ids) instead, to script what the model says.
    """

    def __init__(self, vocab_size: int, *, favour: Callable[[np.ndarray], torch.Tensor | None] | None = None) -> None:
        self.vocab_size = vocab_size
        self._favour = favour
        self._multipliers = (torch.arange(vocab_size, dtype=torch.int64) * _TOKEN + 1) % _PRIME
        self.largest_batch = 0
        self._contexts: list[np.ndarray] = []

    def kv_specs(self) -> list[ContextSpec]:
        """One small layer."""
        return [ContextSpec()]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden [T, 1]: the index of each token's context, read from the cache, for `compute_logits`."""
        keys, values = batch.kv_caches[0]
        flat = keys.view(-1)
        wanted = batch.slots >= 0
        flat[batch.slots[wanted]] = batch.token_ids[wanted].to(flat.dtype)
        values.view(-1)[batch.slots[wanted]] = batch.positions[wanted].to(flat.dtype)
        self._contexts = []
        starts = batch.query_starts.tolist()
        self.largest_batch = max(self.largest_batch, len(starts) - 1)
        for b, (first, last) in enumerate(pairwise(starts)):
            length = int(batch.context_lens[b])
            where = torch.arange(length)
            slots = batch.page_tables[b].to(torch.int64)[where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE
            tokens = flat[slots].to(torch.int64).numpy()
            assert torch.equal(values.view(-1)[slots].to(torch.int64), where), "positions in the cache are wrong"
            for row in range(first, last):
                self._contexts.append(tokens[: length - (last - 1 - row)])
        # Rows that belong to no sequence have no context.
        self._contexts += [np.empty(0, dtype=np.int64)] * (len(batch.token_ids) - len(self._contexts))
        return torch.arange(len(batch.token_ids), dtype=torch.int64).unsqueeze(-1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V], float32."""
        return torch.stack([self.logits_of(self._contexts[row]) for row in hidden[:, 0].tolist()])

    def logits_of(self, context: np.ndarray) -> torch.Tensor:
        """Logits [V] after these token ids; what the engine must come to by whatever way."""
        if self._favour is not None and len(context) and (own := self._favour(context)) is not None:
            return own
        digest = 1
        for token in context.tolist():
            digest = (digest * _POSITION + token + 1) % _PRIME
        return ((self._multipliers * digest) % _PRIME % 4096).to(torch.float32) / 256
