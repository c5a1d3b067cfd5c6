"""The forward that replaces a latent attention layer's: `layers.mla` with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.layers.mla import LatentShape
from tokenspeed.trainer import operators
from tokenspeed.trainer.angles import Angles
from tokenspeed.trainer.layout import Layout
from tokenspeed.trainer.modules import cache_of, layout_of, through_cache


@dataclass(frozen=True)
class LatentPlan:
    """For a latent attention layer: the kernels of its operators, and what the engine's layer knows.

    `lora_scales` multiply queries and latent, if any.
    """

    rope: str
    absorb: str
    write: str
    attend: str
    expand: str
    shape: LatentShape
    scale: float
    angles: Angles
    interleaved: bool
    lora_scales: tuple[float, float] | None


def latent_attention_forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Hidden states [B,S,H] -> [B,S,H], the projection to keys absorbed into the queries."""
    plan: LatentPlan = self.tokenspeed_plan
    layout = layout_of(kwargs)
    q, entries = queries_and_entries(self, plan, hidden_states, compress_queries(self, plan, hidden_states), kwargs)
    sums: torch.Tensor = operators.latent_attention(
        layout.of_queries(q),
        layout.of_keys(entries),
        *layout.paging,
        plan.scale,
        plan.shape.kv_lora_rank,
        plan.write,
        plan.attend,
    )
    return project_sums(self, plan, sums, layout, hidden_states.shape), None


def compress_queries(self: Any, plan: LatentPlan, hidden_states: torch.Tensor) -> torch.Tensor:
    """The latent of the queries, or the hidden states where queries are projected directly."""
    if plan.shape.q_lora_rank is None:
        return hidden_states
    latent: torch.Tensor = self.q_a_layernorm(self.q_a_proj(hidden_states))
    return latent


def queries_and_entries(
    self: Any, plan: LatentPlan, hidden_states: torch.Tensor, latent_q: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in the latent space [B*S,Hq,C], and the entries [B*L,C] that they meet."""
    shape, layout = plan.shape, layout_of(kwargs)
    batch, columns, _ = hidden_states.shape
    q: torch.Tensor = self.q_proj(latent_q) if shape.q_lora_rank is None else self.q_b_proj(latent_q)
    if plan.lora_scales is not None:
        q = q * plan.lora_scales[0]
    q_nope, q_rope = torch.split(q.view(batch * columns, shape.num_heads, -1), [shape.nope_dim, shape.rope_dim], dim=-1)
    compressed = self.kv_a_proj_with_mqa(hidden_states).flatten(0, 1)
    latent, k_rope = torch.split(compressed, [shape.kv_lora_rank, shape.rope_dim], dim=-1)
    positions, table = layout.position_ids.flatten(), plan.angles.table(layout.longest, q.device)
    q_rope, k_rope = operators.rope(q_rope, k_rope.unsqueeze(1), positions, table, plan.interleaved, plan.rope)
    latent = self.kv_a_layernorm(latent)
    if plan.lora_scales is not None:
        latent = latent * plan.lora_scales[1]
    latent = latent.unsqueeze(1)
    if (cache := cache_of(kwargs)) is not None:
        latent, k_rope = through_cache(cache, latent, k_rope, batch, self.layer_idx, layout)
    keys, _ = _by_head(self.kv_b_proj.weight, shape)
    absorbed = operators.batched_linear(q_nope, keys.transpose(1, 2).contiguous(), plan.absorb)
    return torch.cat((absorbed, q_rope), dim=-1), torch.cat((latent, k_rope), dim=-1).squeeze(1)


def project_sums(self: Any, plan: LatentPlan, sums: torch.Tensor, layout: Layout, shape: torch.Size) -> torch.Tensor:
    """What was summed for each token [Tq,Hq,R] -> [B,S,H]; padding sums to zero."""
    padded = layout.padded(sums, shape[0] * shape[1])
    _, values = _by_head(self.kv_b_proj.weight, plan.shape)
    out: torch.Tensor = operators.batched_linear(padded, values.contiguous(), plan.expand)
    projected: torch.Tensor = self.o_proj(out.view(*shape[:2], -1))
    return projected


def _by_head(weight: torch.Tensor, shape: LatentShape) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of `kv_b_proj` that make keys, [Hq,nope,R], and those that make values, [Hq,V,R]."""
    by_head = weight.view(shape.num_heads, shape.nope_dim + shape.value_dim, shape.kv_lora_rank)
    keys, values = torch.split(by_head, [shape.nope_dim, shape.value_dim], dim=1)
    return keys, values
