"""The forwards that replace those of sparse latent attention and its indexer: `layers.sparse` with gradients.

The choice of positions is a constant for the gradients, as it is for transformers: an indexer learns nothing from the
loss of a language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.layers.sparse import IndexShape
from tokenspeed.trainer import operators
from tokenspeed.trainer.angles import Angles
from tokenspeed.trainer.layout import Layout
from tokenspeed.trainer.mla import LatentPlan, compress_queries, project_sums, queries_and_entries
from tokenspeed.trainer.modules import LAYOUT, cache_of, layout_of


@dataclass(frozen=True)
class SparsePlan:
    """For sparse latent attention: that of latent attention, and `order` (the switch `dsa_slot_order`)."""

    latent: LatentPlan
    order: str


@dataclass(frozen=True)
class IndexerPlan:
    """For an indexer: kernels, sizes, the epsilon of its norm and its rotary angles."""

    norm: str
    rope: str
    write: str
    score: str
    choose: str
    shape: IndexShape
    norm_eps: float
    angles: Angles
    interleaved: bool


def sparse_attention_forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """DeepSeek-V3.2: hidden states [B,S,H] -> [B,S,H]."""
    out, _ = _attend(self, hidden_states, kwargs)
    return out, None


def sharing_attention_forward(
    self: Any, hidden_states: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """GLM-MoE-DSA: the same, and the choice int32[Tq,k], which following layers without an indexer take over."""
    out, choice = _attend(self, hidden_states, kwargs)
    return out, None, choice


def _attend(self: Any, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    plan: SparsePlan = self.tokenspeed_plan
    latent = plan.latent
    layout = layout_of(kwargs)
    latent_q = compress_queries(self, latent, hidden_states)
    q, entries = queries_and_entries(self, latent, hidden_states, latent_q, kwargs)
    choice: torch.Tensor
    if self.indexer is None:
        choice = kwargs["prev_topk_indices"]
    else:
        choice = self.indexer(hidden_states, latent_q, cache=cache_of(kwargs), **{LAYOUT: layout})
    sums: torch.Tensor = operators.sparse_attention(
        layout.of_queries(q),
        layout.of_keys(entries),
        choice,
        *layout.paging,
        latent.scale,
        latent.shape.kv_lora_rank,
        plan.order,
        latent.write,
        latent.attend,
    )
    return project_sums(self, latent, sums, layout, hidden_states.shape), choice


@torch.no_grad()
def indexer_forward(self: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Hidden states [B,S,H] and latents of the queries [B,S,Rq] -> positions int32[Tq,k] of every token's choice."""
    plan: IndexerPlan = self.tokenspeed_plan
    layout: Layout = layout_of(kwargs)
    shape = plan.shape
    batch, columns, _ = hidden_states.shape
    q = self.wq_b(q_resid).view(batch * columns, shape.num_heads, shape.head_dim)
    k = operators.layer_norm(
        self.wk(hidden_states).flatten(0, 1), self.k_norm.weight, self.k_norm.bias, plan.norm_eps, plan.norm
    )
    positions, table = layout.position_ids.flatten(), plan.angles.table(layout.longest, q.device)
    q, k = operators.rope(q, k.unsqueeze(1), positions, table, plan.interleaved, plan.rope)
    k = k.squeeze(1)
    if (cache := kwargs.get("cache")) is not None:
        k = cache.update_indexer(k.view(batch, columns, -1), self.layer_idx).flatten(0, 1)
    weights = self.weights_proj(hidden_states).flatten(0, 1).to(torch.float32) * shape.num_heads**-0.5
    choice: torch.Tensor = operators.choose_positions(
        layout.of_queries(q),
        layout.of_queries(weights),
        layout.of_keys(k),
        layout.of_queries(positions),
        *layout.paging,
        shape.head_dim**-0.5,
        shape.top_k,
        plan.write,
        plan.score,
        plan.choose,
    )
    return choice
