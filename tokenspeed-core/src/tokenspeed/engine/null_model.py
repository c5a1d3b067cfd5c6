"""A model and operators that compute nothing, so that what is left of a step's time is the engine's own cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.kv_cache import KVSpecLike
from tokenspeed.engine.sampler import SamplingOperators


class NullModel:
    """Hidden states and logits are views of zeros that exist once; there is no KV cache."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._hidden = torch.zeros(1, 1)
        self._logits = torch.zeros(1, vocab_size)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, 1]."""
        return self._hidden.expand(len(batch.token_ids), 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V]."""
        return self._logits.expand(len(hidden), -1)

    def kv_specs(self) -> Sequence[KVSpecLike]:
        """No layer."""
        return ()


def null_operators(vocab_size: int) -> SamplingOperators:
    """Operators that return prepared answers: tokens that vary with the position, so that text is really decoded."""

    def sample(
        logits: torch.Tensor,  # noqa: ARG001
        temperature: torch.Tensor,  # noqa: ARG001
        top_k: torch.Tensor,  # noqa: ARG001
        top_p: torch.Tensor,  # noqa: ARG001
        min_p: torch.Tensor,  # noqa: ARG001
        seeds: torch.Tensor,  # noqa: ARG001
        positions: torch.Tensor,
    ) -> torch.Tensor:
        return (positions * 7919) % vocab_size

    def logprobs(
        logits: torch.Tensor,  # noqa: ARG001
        ids: torch.Tensor,
        temperature: torch.Tensor,  # noqa: ARG001
        order: str,  # noqa: ARG001
        block: int,  # noqa: ARG001
    ) -> torch.Tensor:
        return torch.zeros(ids.shape, dtype=torch.float32)

    return SamplingOperators(sample, sample, logprobs)
