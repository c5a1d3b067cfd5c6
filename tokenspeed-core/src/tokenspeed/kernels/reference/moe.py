"""References of `moe.route` and `moe.experts`: how a mixture-of-experts layer chooses, and how it adds.

What every kernel of `moe.route` computes for a token, in fp32:

1. s = softmax(logits), or sigmoid of each logit. The choice is made by c = s + bias, or by s where there is no bias.
2. With several groups, a group counts as much as the sum of its two best c; the best `top_groups` groups stay.
3. The k best c of what stayed, best first. Equal numbers (+0 and -0 are equal) go to the lowest expert, or group; NaN
   comes before every number. So it is `torch.topk(..., sorted=True)`, with the order of equal numbers, which torch
   leaves open, stated.
4. Their weights are s (without bias); divided by their sum + 1e-20, added in slot order, if they are to be normalised;
   then times the scale.

The form `torch` is exactly this. The form `fused` may choose by the logits, and normalise over the chosen only, where
that is the same in exact arithmetic: with softmax, no bias and one group. Two logits whose softmax is equal in fp32 are
then told apart, and weights can differ in their last bits.
"""

from __future__ import annotations

import torch

NORMALISE_EPSILON = 1e-20
"""Keeps the division finite when every chosen score is zero (sigmoid); it changes no sum above 1e-13."""


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    form: str,
    normalise: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32[T,k], ids int32[T,k]) of logits [T,E]; see the module's docstring."""
    wide = logits.to(torch.float32)
    if scoring == "sigmoid":
        scores = torch.sigmoid(wide)
    elif scoring == "softmax":
        scores = torch.softmax(wide, dim=-1)
    else:
        raise ValueError(f"scoring {scoring!r} is not one of softmax, sigmoid")
    if form == "fused" and scoring == "softmax" and bias is None and groups == 1:
        ids = _best(wide, top_k)
        weights = torch.softmax(wide.gather(-1, ids), dim=-1) if normalise else scores.gather(-1, ids)
        return weights * scale, ids.to(torch.int32)
    if form not in ("torch", "fused"):
        raise ValueError(f"form {form!r} is not one of torch, fused")
    choice = scores if bias is None else scores + bias
    if groups > 1:
        choice = choice.masked_fill(~_eligible(choice, groups, top_groups), -torch.inf)
    ids = _best(choice, top_k)
    weights = scores.gather(-1, ids)
    if normalise:
        total = torch.zeros_like(weights[:, :1])
        for slot in range(top_k):
            total = total + weights[:, slot : slot + 1]
        weights = weights / (total + NORMALISE_EPSILON)
    return weights * scale, ids.to(torch.int32)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices int64[T,count] of the largest values, best first, equal ones by ascending index."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def _eligible(choice: torch.Tensor, groups: int, top_groups: int) -> torch.Tensor:
    """Which experts lie in the best groups, bool[T,E]."""
    best_two = choice.view(len(choice), groups, -1).topk(2, dim=-1).values
    kept = torch.zeros(len(choice), groups, dtype=torch.bool, device=choice.device)
    kept.scatter_(1, _best(best_two.sum(-1), top_groups), True)
    return kept.repeat_interleave(choice.shape[-1] // groups, dim=-1)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    order: str,
) -> torch.Tensor:
    """Weighted sum of expert outputs, [T,H].

    `slot`: from fp32 zero, slot after slot, plus weight * output in fp32; one rounding at the end. `rank`: expert after
    expert, each term and each sum rounded to x's dtype, as transformers adds. Raises ValueError for another order.
    """
    outputs = _outputs(x, gate_up, down, ids)
    if order == "slot":
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for slot in range(ids.shape[1]):
            total = total + weights[:, slot, None] * outputs[:, slot].to(torch.float32)
        return total.to(x.dtype)
    if order != "rank":
        raise ValueError(f"combine order {order!r} is not one of rank, slot")
    out = torch.zeros_like(x)
    terms = (outputs.to(torch.float32) * weights.unsqueeze(-1)).to(x.dtype)
    by_expert = torch.sort(ids, dim=-1, stable=True).indices
    for place in range(ids.shape[1]):
        out = out + terms[torch.arange(len(x), device=x.device), by_expert[:, place]]
    return out


def _outputs(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The output of each slot's expert in x's dtype, [T,k,H]; the identity for ids beyond the experts."""
    outputs = x.unsqueeze(1).repeat(1, ids.shape[1], 1)
    for expert in sorted(set(ids.flatten().tolist())):
        if expert < len(gate_up):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = _project(x[token], gate_up[expert]).to(torch.float32).chunk(2, dim=-1)
            hidden = (gate * torch.sigmoid(gate) * up).to(x.dtype)
            outputs[token, slot] = _project(hidden, down[expert])
    return outputs


def _project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.to(torch.float32) @ weight.to(torch.float32).T).to(x.dtype)
