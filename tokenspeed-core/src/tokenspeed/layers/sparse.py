"""Sparse latent attention (DeepSeek V3.2): a lightning indexer scores all positions, and a query attends to the best k.

The indexer has heads, keys and a cache plane of its own. A layer may also reuse the choice of an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.layers.attention import KVSpec
from tokenspeed.layers.context import LayerContext, Operation
from tokenspeed.layers.linear import Linear
from tokenspeed.layers.mla import LatentAttention, LatentShape
from tokenspeed.layers.norm import LayerNorm
from tokenspeed.layers.rope import RotaryEmbedding

MOST_SCORES = 1 << 24
"""Scores that exist at a time (64 MiB); a step with more queries of long contexts is scored part by part."""


@dataclass(frozen=True)
class IndexShape:
    """Sizes of an indexer: heads, width of a head's query and of the key, and how many positions a query keeps."""

    num_heads: int
    head_dim: int
    top_k: int


class Choice:
    """The positions that an indexer chose for the batch in work, int32[T,k]: from its layer to those that share it."""

    indices: torch.Tensor


class Indexer(nn.Module):
    """The checkpoint names are `wq_b`, `wk`, `k_norm` and `weights_proj`. Queries come from the attention's own latent.

    `rotary` turns the first features of a head and leaves the others.
    """

    def __init__(
        self,
        ctx: LayerContext,
        *,
        layer: int,
        hidden_size: int,
        latent_size: int,
        shape: IndexShape,
        rotary: RotaryEmbedding,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.shape = shape
        self.rotary = rotary
        self.wq_b = Linear(ctx, latent_size, shape.num_heads * shape.head_dim)
        self.wk = Linear(ctx, hidden_size, shape.head_dim)
        self.k_norm = LayerNorm(ctx, shape.head_dim, 1e-6)
        self.weights_proj = Linear(ctx, hidden_size, shape.num_heads)
        dtypes = {"x": ctx.dtype, "kv": ctx.dtype}
        self.write = ctx.operator("cache.write_latent", dtypes=dtypes, facts={"width": shape.head_dim})
        self.score = ctx.operator(
            "attention.index_scores",
            dtypes=dtypes,
            facts={"index_heads": shape.num_heads, "width": shape.head_dim},
        )
        self.choose = ctx.operator("attention.index_topk", dtypes={}, facts={"top_k": shape.top_k})

    def forward(self, x: torch.Tensor, latent_q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [T,H] and latents of the queries [T,Rq] -> chosen positions, int32[T,k]; writes the indexer's keys."""
        shape = self.shape
        q = self.wq_b(latent_q).view(len(x), shape.num_heads, shape.head_dim)
        q, k = self.rotary(q, self.k_norm(self.wk(x)).unsqueeze(1), batch.positions)
        _, keys = batch.kv_caches[self.layer]
        self.write(k.squeeze(1), keys, batch.slots)
        weights = self.weights_proj(x).to(torch.float32) * shape.num_heads**-0.5
        rows = max(1, MOST_SCORES // max(1, PAGE_SIZE * batch.page_tables.shape[1]))
        parts = [self._choose_rows(q, weights, batch, at, min(at + rows, len(x))) for at in range(0, len(x), rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _choose_rows(
        self, q: torch.Tensor, weights: torch.Tensor, batch: ForwardBatch, begin: int, end: int
    ) -> torch.Tensor:
        """The choice of the queries [begin, end): as if the others came in another step."""
        starts, lengths = batch.query_starts, batch.context_lens
        if end - begin < len(q):
            # A sequence ends where its last query in this part stands, or before its first one.
            lengths = lengths - (starts[1:] - starts[1:].clamp(max=end).maximum(starts[:-1]))
            starts = starts.clamp(begin, end) - begin
        scores = self.score(
            q[begin:end],
            weights[begin:end],
            batch.kv_caches[self.layer][1],
            starts,
            lengths,
            batch.page_tables,
            self.shape.head_dim**-0.5,
        )
        indices: torch.Tensor = self.choose(scores, batch.positions[begin:end], self.shape.top_k)
        return indices


class SparseLatentAttention(LatentAttention):
    """Latent attention over the positions of a `Choice`, which its own `indexer` makes, or an earlier layer's did.

    The switch `dsa_slot_order` decides in which order the chosen entries are reduced. Other arguments as for
    LatentAttention; `shape.q_lora_rank` must not be None.
    """

    def __init__(
        self,
        ctx: LayerContext,
        *,
        layer: int,
        hidden_size: int,
        shape: LatentShape,
        choice: Choice,
        index: IndexShape | None,
        index_rotary: RotaryEmbedding,
        **rest: Any,
    ) -> None:
        super().__init__(ctx, layer=layer, hidden_size=hidden_size, shape=shape, **rest)
        self.choice = choice
        self.indexer: Indexer | None = None
        if index is not None:
            assert shape.q_lora_rank is not None
            self.indexer = Indexer(
                ctx,
                layer=layer,
                hidden_size=hidden_size,
                latent_size=shape.q_lora_rank,
                shape=index,
                rotary=index_rotary,
            )
            self.kv_spec = KVSpec(1, shape.entry_dim, ctx.dtype, latent=True, index_dim=index.head_dim)

    def attention_operator(self, ctx: LayerContext) -> Operation:
        self.order = ctx.switches.get("dsa_slot_order", "selection")
        return ctx.operator(
            "attention.sparse_paged", dtypes=self.dtypes, facts=self.facts, traits={"slot_order": self.order}
        )

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [T,H] -> [T,H]."""
        latent_q = self.compress_queries(x)
        q = self.write_and_absorb(x, latent_q, batch)
        if self.indexer is not None:
            self.choice.indices = self.indexer(x, latent_q, batch)
        sums = self.attend(
            q,
            batch.kv_caches[self.layer][0],
            self.choice.indices,
            batch.query_starts,
            batch.context_lens,
            batch.page_tables,
            self.scale,
            self.shape.kv_lora_rank,
            self.order,
        )
        return self.project_sums(sums)
