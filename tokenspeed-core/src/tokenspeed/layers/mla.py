"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): one compressed entry for all heads is cached.

The projection from the latent space to keys is absorbed into the queries, and the one to values is applied to what was
summed in the latent space, for prefill and decode alike; so a token's bits do not depend on which of them computed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.layers.attention import CachedAttention, KVSpec
from tokenspeed.layers.context import LayerContext, Operation
from tokenspeed.layers.linear import Linear
from tokenspeed.layers.norm import RMSNorm, ScaledRMSNorm
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.layers.weights import WeightLayer


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention: of a head's parts without and with rotation, of its value, and of the two latents.

    `q_lora_rank` is None where queries are projected directly.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_lora_rank: int
    q_lora_rank: int | None

    @property
    def entry_dim(self) -> int:
        """Width of a cached entry."""
        return self.kv_lora_rank + self.rope_dim


class LatentProjection(WeightLayer):
    """`kv_b_proj`: of each head, rows that make its keys, and rows that make its values, from the latent."""

    def __init__(self, ctx: LayerContext, shape: LatentShape) -> None:
        super().__init__()
        self.shape = shape
        heads, rank = shape.num_heads, shape.kv_lora_rank
        self.weight: nn.Parameter | None = self.new_weight(
            (heads * (shape.nope_dim + shape.value_dim), rank), ctx.dtype
        )
        dtypes = {"x": ctx.dtype, "weight": ctx.dtype}
        self.absorb = ctx.operator(
            "gemm.batched", dtypes=dtypes, facts={"groups": heads, "k": shape.nope_dim, "n": rank}
        )
        self.expand = ctx.operator(
            "gemm.batched", dtypes=dtypes, facts={"groups": heads, "k": rank, "n": shape.value_dim}
        )
        self.packed: tuple[Any, Any] = (None, None)

    def pack(self) -> None:
        assert self.weight is not None
        shape = self.shape
        by_head = self.weight.data.view(shape.num_heads, shape.nope_dim + shape.value_dim, shape.kv_lora_rank)
        keys, values = torch.split(by_head, [shape.nope_dim, shape.value_dim], dim=1)
        # Plain kernels keep what they are given: a copy of their own lets go of the merged weight.
        self.packed = (
            self.absorb.prepare(keys.transpose(1, 2).contiguous()),
            self.expand.prepare(values.contiguous()),
        )
        self.weight = None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Unrotated queries [T,Hq,nope] in the latent space, [T,Hq,R]."""
        out: torch.Tensor = self.absorb(x, self.packed[0])
        return out

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Latent sums [T,Hq,R] as values, [T,Hq,V]."""
        out: torch.Tensor = self.expand(x, self.packed[1])
        return out


class LatentAttention(CachedAttention):
    """The checkpoint names are `q_proj`, or `q_a_proj`, `q_a_layernorm` and `q_b_proj`; `kv_a_proj_with_mqa`,
    `kv_a_layernorm`, `kv_b_proj`, `o_proj`.

    `layer` is the index into `ForwardBatch.kv_caches`; `scale` multiplies the scores. The norms of the latents have an
    epsilon of their own, which no configuration states. `lora_scales` multiply the queries after `q_b_proj` and the
    latent after its norm (LongCat-Flash): the switch `mla_lora_scale` decides whether as operations of their own
    (`runtime`), or folded into the norms' weights.
    """

    def __init__(
        self,
        ctx: LayerContext,
        *,
        layer: int,
        hidden_size: int,
        shape: LatentShape,
        rotary: RotaryEmbedding,
        scale: float,
        norm_eps: float,
        bias: bool = False,
        lora_scales: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.shape = shape
        self.rotary = rotary
        self.scale = scale
        self.kv_spec = KVSpec(1, shape.entry_dim, ctx.dtype, latent=True)
        folded = lora_scales is not None and ctx.switches.get("mla_lora_scale", "folded") == "folded"
        self.lora_scales = None if folded else lora_scales

        def latent_norm(size: int, scale: float) -> RMSNorm:
            return ScaledRMSNorm(ctx, size, norm_eps, scale) if folded else RMSNorm(ctx, size, norm_eps)

        q_scale, kv_scale = lora_scales or (1.0, 1.0)
        query_size = shape.num_heads * (shape.nope_dim + shape.rope_dim)
        if shape.q_lora_rank is None:
            self.q_proj = Linear(ctx, hidden_size, query_size)
        else:
            self.q_a_proj = Linear(ctx, hidden_size, shape.q_lora_rank, bias=bias)
            self.q_a_layernorm = latent_norm(shape.q_lora_rank, q_scale)
            self.q_b_proj = Linear(ctx, shape.q_lora_rank, query_size)
        self.kv_a_proj_with_mqa = Linear(ctx, hidden_size, shape.entry_dim, bias=bias)
        self.kv_a_layernorm = latent_norm(shape.kv_lora_rank, kv_scale)
        self.kv_b_proj = LatentProjection(ctx, shape)
        self.o_proj = Linear(ctx, shape.num_heads * shape.value_dim, hidden_size, bias=bias)
        self.dtypes = {"x": ctx.dtype, "kv": ctx.dtype}
        self.facts = {"heads": shape.num_heads, "latent_dim": shape.kv_lora_rank, "width": shape.entry_dim}
        self.write = ctx.operator("cache.write_latent", dtypes=self.dtypes, facts={"width": shape.entry_dim})
        self.attend = self.attention_operator(ctx)

    def attention_operator(self, ctx: LayerContext) -> Operation:
        """Ask for the operator that `attend` is."""
        return ctx.operator("attention.mla_paged", dtypes=self.dtypes, facts=self.facts)

    def compress_queries(self, x: torch.Tensor) -> torch.Tensor:
        """x [T,H] -> the latent of the queries [T,Rq], or x itself where queries are projected directly."""
        if self.shape.q_lora_rank is None:
            return x
        latent: torch.Tensor = self.q_a_layernorm(self.q_a_proj(x))
        return latent

    def expand_queries(self, latent_q: torch.Tensor) -> torch.Tensor:
        """What `compress_queries` returned -> queries [T,Hq,nope + rope], not rotated."""
        q: torch.Tensor = self.q_proj(latent_q) if self.shape.q_lora_rank is None else self.q_b_proj(latent_q)
        if self.lora_scales is not None:
            q = q * self.lora_scales[0]
        return q.view(len(q), self.shape.num_heads, -1)

    def write_and_absorb(self, x: torch.Tensor, latent_q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Writes the entries of x [T,H] to the cache; queries of `latent_q` for entries, [T,Hq,C]."""
        shape = self.shape
        q_nope, q_rope = torch.split(self.expand_queries(latent_q), [shape.nope_dim, shape.rope_dim], dim=-1)
        latent, k_rope = torch.split(self.kv_a_proj_with_mqa(x), [shape.kv_lora_rank, shape.rope_dim], dim=-1)
        q_rope, k_rope = self.rotary(q_rope, k_rope.unsqueeze(1), batch.positions)
        latent = self.kv_a_layernorm(latent)
        if self.lora_scales is not None:
            latent = latent * self.lora_scales[1]
        cache, _ = batch.kv_caches[self.layer]
        self.write(torch.cat((latent, k_rope.squeeze(1)), dim=-1), cache, batch.slots)
        return torch.cat((self.kv_b_proj.queries(q_nope), q_rope), dim=-1)

    def project_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """What was summed in the latent space [T,Hq,R] -> [T,H]."""
        out: torch.Tensor = self.o_proj(self.kv_b_proj.values(sums).flatten(-2))
        return out

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [T,H] -> [T,H]."""
        q = self.write_and_absorb(x, self.compress_queries(x), batch)
        sums = self.attend(
            q,
            batch.kv_caches[self.layer][0],
            batch.query_starts,
            batch.context_lens,
            batch.page_tables,
            self.scale,
            self.shape.kv_lora_rank,
        )
        return self.project_sums(sums)
