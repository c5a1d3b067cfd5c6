"""Self-attention over the paged KV cache, and the projections around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.linear import Linear, MergedLinear
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rope import RotaryEmbedding


@dataclass(frozen=True)
class KVSpec:
    """What one layer keeps for each token: keys and values of `num_kv_heads` heads of `head_dim` features.

    `latent` layers keep one compressed entry of `head_dim` features, and beside it the `index_dim` features by which an
    indexer finds the token again, or nothing.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    latent: bool = False
    index_dim: int = 0

    @property
    def value_dim(self) -> int:
        """Features of a head in the second cache of the layer: its value, or of latent layers the indexer's key."""
        return self.index_dim if self.latent else self.head_dim


class CachedAttention(nn.Module):
    """An attention with a cache: `layer` is its index into `ForwardBatch.kv_caches`, `kv_spec` what it keeps there."""

    layer: int
    kv_spec: KVSpec


class Attention(CachedAttention):
    """Writes a layer's keys and values to its cache, then attends over the cache.

    `layer` is the index into `ForwardBatch.kv_caches`; `window` the keys that a query sees, itself included (0: all).
    """

    def __init__(
        self, ctx: LayerContext, *, layer: int, num_heads: int, num_kv_heads: int, head_dim: int, window: int = 0
    ) -> None:
        super().__init__()
        self.layer = layer
        self.window = window
        self.scale = head_dim**-0.5
        self.kv_spec = KVSpec(num_kv_heads, head_dim, ctx.dtype)
        dtypes = {"x": ctx.dtype, "kv": ctx.dtype}
        self.write = ctx.operator("cache.write", dtypes=dtypes, facts={"head_dim": head_dim})
        self.attend = ctx.operator(
            "attention.paged",
            dtypes=dtypes,
            facts={"head_dim": head_dim, "group_size": num_heads // num_kv_heads},
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q [T,Hq,D], k and v [T,Hkv,D] -> [T,Hq,D]."""
        k_cache, v_cache = batch.kv_caches[self.layer]
        self.write(k, v, k_cache, v_cache, batch.slots)
        out: torch.Tensor = self.attend(
            q,
            k_cache,
            v_cache,
            batch.query_starts,
            batch.context_lens,
            batch.page_tables,
            self.scale,
            self.window,
        )
        return out


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions, as in Llama and Qwen.

    `qk_norm_eps` norms each query and key head before the rotation (Qwen3); None leaves them alone. The checkpoint
    names are `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`.
    """

    def __init__(
        self,
        ctx: LayerContext,
        *,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        window: int = 0,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rotary = rotary
        parts = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        self.qkv_proj = MergedLinear(ctx, hidden_size, parts, bias=qkv_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(ctx, head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(ctx, head_dim, qk_norm_eps)
        self.attention = Attention(
            ctx, layer=layer, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, window=window
        )
        self.o_proj = Linear(ctx, num_heads * head_dim, hidden_size, bias=output_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [T,H] -> [T,H]."""
        q, k, v = (part.view(len(part), -1, self.head_dim) for part in self.qkv_proj.split(self.qkv_proj(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, k, batch.positions)
        out: torch.Tensor = self.o_proj(self.attention(q, k, v, batch).flatten(-2))
        return out
