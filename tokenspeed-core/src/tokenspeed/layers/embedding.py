"""Token embedding and output head, which may share one weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.linear import Linear
from tokenspeed.layers.weights import WeightLayer


class Embedding(WeightLayer):
    """Token ids int64[T] -> [T,H]."""

    def __init__(self, ctx: LayerContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = self.new_weight((vocab_size, hidden_size), ctx.dtype)
        self.lookup = ctx.operator("embedding.lookup", dtypes={"weight": ctx.dtype})
        self.tied: list[TiedLMHead] = []
        self.packed: Any = None

    def pack(self) -> None:
        assert self.weight is not None
        self.packed = None
        for head in self.tied:
            head.packed = head.linear.prepare(self.weight.data)
            if self.lookup.reads_packing_of(head.linear):
                self.packed = head.packed  # one table serves both
        if self.packed is None:
            self.packed = self.lookup.prepare(self.weight.data)
        self.weight = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lookup(ids, self.packed)
        return out


class LMHead(Linear):
    """Hidden states [R,H] -> logits [R,V] in the model's dtype. Weight formats leave it alone."""

    may_be_quantised = False

    def __init__(self, ctx: LayerContext, hidden_size: int, vocab_size: int) -> None:
        super().__init__(ctx, hidden_size, vocab_size)


class TiedLMHead(LMHead):
    """An output head that reads the embedding's weight; the embedding fills and packs it."""

    def __init__(self, ctx: LayerContext, embedding: Embedding) -> None:
        assert embedding.weight is not None
        vocab_size, hidden_size = embedding.weight.shape
        super().__init__(ctx, hidden_size, vocab_size)
        self.weight = None
        embedding.tied.append(self)

    def pack(self) -> None:
        """The embedding does it, while it still holds the weight."""
