"""The forwards that replace a router's and the routed experts': `layers.moe` with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.layers.moe import Routing
from tokenspeed.trainer import operators


@dataclass(frozen=True)
class RouterPlan:
    """For a router: kernels, `form` (the switch `router_topk`), and the dtype in which the logits are computed."""

    linear: str
    route: str
    routing: Routing
    form: str
    dtype: torch.dtype


@dataclass(frozen=True)
class ExpertsPlan:
    """For the routed experts: the kernel, and `order` (the switch `moe_combine_order`)."""

    kernel: str
    order: str


def router_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits [T,E], weights fp32[T,k], experts int64[T,k]), the best choice first, of hidden states [...,H]."""
    plan: RouterPlan = self.tokenspeed_plan
    routing = plan.routing
    own: torch.Tensor = self.classifier.weight if hasattr(self, "classifier") else self.weight
    x = hidden_states.reshape(-1, own.shape[1]).to(plan.dtype)
    logits: torch.Tensor = operators.linear(x, own.to(plan.dtype), None, plan.linear)
    weights, ids = operators.route(
        logits,
        self.e_score_correction_bias.float() if routing.bias else None,
        routing.top_k,
        routing.scoring,
        plan.form,
        routing.normalise,
        routing.scale,
        routing.groups,
        routing.top_groups,
        plan.route,
    )
    return logits, weights, ids


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Hidden states [T,H], experts int64[T,k] and their weights fp32[T,k] -> [T,H]."""
    plan: ExpertsPlan = self.tokenspeed_plan
    out: torch.Tensor = operators.experts(
        hidden_states, self.gate_up_proj, self.down_proj, top_k_weights, top_k_index, plan.order, plan.kernel
    )
    return out
