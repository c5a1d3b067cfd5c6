"""The backward passes, in plain torch: the derivative of each operator's formula, as if nothing were rounded.

Half-precision activations are widened to fp32 where the forward computes in fp32; other dtypes are used as they are.
On one machine with one number of threads the same inputs give the same gradients.
"""

from __future__ import annotations

from collections import defaultdict

import torch


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def rms_norm(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [...,H] and weight [H] for weight * x / sqrt(mean(x^2) + eps)."""
    wide_x, wide_grad = _wide(x), _wide(grad)
    inverse = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    normed = wide_x * inverse
    scaled = wide_grad * _wide(weight)
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad_weight = (wide_grad * normed.to(x.dtype).to(normed.dtype)).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def silu_and_mul(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Gradient of gate_up [T,2F] for silu(gate) * up."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    wide_grad = _wide(grad)
    sigmoid = torch.sigmoid(gate)
    grad_gate = wide_grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, wide_grad * gate * sigmoid), dim=-1).to(gate_up.dtype)


def rotate_back(grad: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Gradient of x [T,heads,D] for its rotation by the angles of `positions`: the opposite rotation (and scale)."""
    wide = _wide(grad)
    cos, sin = cos_sin[positions].to(wide.dtype).unsqueeze(1).chunk(2, dim=-1)
    rotary = 2 * cos.shape[-1]
    first, second = wide[..., :rotary].chunk(2, dim=-1)
    back = torch.cat((first * cos + second * sin, second * cos - first * sin, wide[..., rotary:]), dim=-1)
    return back.to(grad.dtype)


def logprobs(grad: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Gradient of logits [R,V] for log_softmax(logits / temperature) at ids [R,M]; temperature 0 counts as 1.

    A negative id contributes nothing.
    """
    divisor = torch.where(temperature == 0, torch.ones_like(temperature), temperature).unsqueeze(-1)
    wide_grad = grad.masked_fill(ids < 0, 0)
    softmax = torch.softmax(_wide(logits) / divisor, dim=-1)
    out = softmax.mul_(-wide_grad.sum(-1, keepdim=True))
    out.scatter_add_(-1, ids.clamp_min(0), wide_grad.to(out.dtype))
    return out.div_(divisor).to(logits.dtype)


def attention(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_counts: list[int],
    key_counts: list[int],
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q [Tq,Hq,D], k and v [Tk,Hkv,D] for causal attention inside ragged sequences.

    Sequence b has `query_counts[b]` queries, which are the last of its `key_counts[b]` keys. Sequences of one shape are
    computed together; the scores of the largest such group are what takes memory.
    """
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for (queries, keys), rows in _groups(query_counts, key_counts).items():
        q_rows = _rows([start for start, _ in rows], queries, q.device)
        k_rows = _rows([start for _, start in rows], keys, k.device)
        parts = _attention_of_equals(grad[q_rows], q[q_rows], k[k_rows], v[k_rows], scale, window)
        for whole, index, part in zip((grad_q, grad_k, grad_v), (q_rows, k_rows, k_rows), parts, strict=True):
            whole[index] = part.to(whole.dtype)
    return grad_q, grad_k, grad_v


def _groups(query_counts: list[int], key_counts: list[int]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(queries, keys) -> the first query row and the first key row of every sequence of that shape."""
    groups: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    q_start = k_start = 0
    for queries, keys in zip(query_counts, key_counts, strict=True):
        if queries:
            groups[queries, keys].append((q_start, k_start))
        q_start, k_start = q_start + queries, k_start + keys
    return groups


def _rows(starts: list[int], count: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(starts, device=device).unsqueeze(-1) + torch.arange(count, device=device)


def _attention_of_equals(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad, q [N,n,Hq,D], k, v [N,L,Hkv,D] -> the gradients of q, k and v, in the wide dtype."""
    queries, heads = q.shape[1:3]
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    # [N,Hkv,group,n,D] beside [N,Hkv,1,L,D]: every query head of a group meets the same keys.
    split = (len(q), queries, kv_heads, group, -1)
    q, grad = (_wide(x).reshape(split).permute(0, 2, 3, 1, 4) for x in (q, grad))
    k, v = (_wide(x).permute(0, 2, 1, 3).unsqueeze(2) for x in (k, v))
    weights = torch.softmax(_masked(q @ k.transpose(-1, -2) * scale, queries, keys, window), dim=-1)
    grad_v = (weights.transpose(-1, -2) @ grad).sum(2)
    grad_weights = grad @ v.transpose(-1, -2)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
    grad_q = (grad_scores @ k).permute(0, 3, 1, 2, 4).flatten(2, 3)
    grad_k = (grad_scores.transpose(-1, -2) @ q).sum(2)
    return grad_q, grad_k.transpose(1, 2), grad_v.transpose(1, 2)


def _masked(scores: torch.Tensor, queries: int, keys: int, window: int) -> torch.Tensor:
    """-inf where a query would see a later key, or one before its window."""
    query_at = torch.arange(keys - queries, keys, device=scores.device).unsqueeze(-1)
    key_at = torch.arange(keys, device=scores.device)
    hidden = key_at > query_at
    if window:
        hidden |= key_at <= query_at - window
    return scores.masked_fill(hidden, -torch.inf)
