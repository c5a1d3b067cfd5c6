"""The backward passes, in plain torch: the derivative of each operator's formula, as if nothing were rounded.

Half-precision activations are widened to fp32 where the forward computes in fp32; other dtypes are used as they are.
On one machine with one number of threads the same inputs give the same gradients.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from tokenspeed.kernels.reference.moe import NORMALISE_EPSILON


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


def rope(
    grad_q: torch.Tensor, grad_k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of q [T,Hq,D] and k [T,Hkv,D] for their rotation."""
    grad_q, grad_k = (rotate_back(grad, positions, cos_sin, interleaved) for grad in (grad_q, grad_k))
    return grad_q, grad_k


def rotate_back(
    grad: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Gradient of x [T,heads,D] for its rotation by the angles of `positions`: the opposite rotation (and scale)."""
    wide = _wide(grad)
    cos, sin = cos_sin[positions].to(wide.dtype).unsqueeze(1).chunk(2, dim=-1)
    rotary = 2 * cos.shape[-1]
    turned = wide[..., :rotary]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (first * cos + second * sin, second * cos - first * sin)
    back = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((back, wide[..., rotary:]), dim=-1).to(grad.dtype)


def batched_linear(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [T,G,K] and weight [G,N,K] for the projection of each group, [T,G,N]."""
    by_group = grad.transpose(0, 1)
    return (by_group @ weight).transpose(0, 1), by_group.transpose(1, 2) @ x.transpose(0, 1)


def logprobs(grad: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Gradient of logits [R,V] for log_softmax(logits / temperature) at ids [R,M]; temperature 0 counts as 1.

    A negative id contributes nothing.
    """
    divisor = torch.where(temperature == 0, torch.ones_like(temperature), temperature).unsqueeze(-1)
    wide_grad = grad.masked_fill(ids < 0, 0)
    softmax = torch.softmax(_wide(logits) / divisor, dim=-1)
    total = -wide_grad.sum(-1, keepdim=True)
    # As large as the logits, so in place, unless it is kept for a second derivative.
    out = softmax * total if softmax.requires_grad else softmax.mul_(total)
    out.scatter_add_(-1, ids.clamp_min(0), wide_grad.to(out.dtype))
    return out.div_(divisor).to(logits.dtype)


def attention(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q [Tq,Hq,D], k and v [Tk,Hkv,D] for causal attention inside ragged sequences.

    `query_starts` int32[B+1] and `context_lens` int32[B] as in `attention.paged`: the queries of a sequence are the
    last of its keys. Sequences of one shape are computed together; the scores of the largest such group are what takes
    memory.
    """
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for (queries, keys), rows in _groups(query_starts, context_lens).items():
        q_rows = _rows([start for start, _ in rows], queries, q.device)
        k_rows = _rows([start for _, start in rows], keys, k.device)
        hidden = _hidden(queries, keys, window, q.device)
        parts = _attention_of_equals(grad[q_rows], q[q_rows], k[k_rows], v[k_rows], scale, hidden)
        for whole, index, part in zip((grad_q, grad_k, grad_v), (q_rows, k_rows, k_rows), parts, strict=True):
            whole[index] = part.to(whole.dtype)
    return grad_q, grad_k, grad_v


def latent_attention(
    grad: torch.Tensor,
    q: torch.Tensor,
    entries: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    latent_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of q [Tq,Hq,C] and entries [Tk,C], whose first `latent_dim` values are summed; else as `attention`."""
    keys = _wide(entries).unsqueeze(1)
    values = keys[..., :latent_dim]
    grad_q, grad_keys, grad_values = attention(grad, q, keys, values, query_starts, context_lens, scale, 0)
    grad_keys[..., :latent_dim] += grad_values
    return grad_q, grad_keys.squeeze(1).to(entries.dtype)


def sparse_attention(
    grad: torch.Tensor,
    q: torch.Tensor,
    entries: torch.Tensor,
    indices: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    latent_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `latent_attention`, of each query over the positions `indices` int[Tq,k] of its sequence; -1 is none."""
    keys = _wide(entries)
    grad_q, grad_keys = torch.zeros_like(q), torch.zeros_like(keys)
    q_start = k_start = 0
    for queries, length in _sizes(query_starts, context_lens):
        q_rows, k_rows = slice(q_start, q_start + queries), slice(k_start, k_start + length)
        q_start, k_start = q_start + queries, k_start + length
        if not queries:
            continue
        chosen = indices[q_rows].long()
        hidden = torch.ones(queries, length + 1, dtype=torch.bool, device=q.device)
        hidden = hidden.scatter(-1, chosen.where(chosen >= 0, length), False)[:, :length]
        own = keys[k_rows].unsqueeze(0).unsqueeze(2)
        part_q, part_k, part_v = _attention_of_equals(
            grad[q_rows].unsqueeze(0), q[q_rows].unsqueeze(0), own, own[..., :latent_dim], scale, hidden
        )
        grad_q[q_rows] = part_q[0].to(q.dtype)
        grad_keys[k_rows] = part_k[0, :, 0]
        grad_keys[k_rows, :latent_dim] += part_v[0, :, 0]
    return grad_q, grad_keys.to(entries.dtype)


def route(
    grad: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, scoring: str, normalise: bool, scale: float
) -> torch.Tensor:
    """Gradient of logits [T,E] for the weights [T,k] of the chosen experts (ids int64[T,k]); the choice is a constant.

    `scoring`, `normalise` and `scale` as in `moe.route`.
    """
    wide = _wide(logits)
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    grad_chosen = grad.to(scores.dtype) * scale
    if normalise:
        chosen = scores.gather(-1, ids)
        total = chosen.sum(-1, keepdim=True) + NORMALISE_EPSILON
        grad_chosen = (grad_chosen - (grad_chosen * chosen / total).sum(-1, keepdim=True)) / total
    grad_scores = torch.zeros_like(scores).scatter(-1, ids, grad_chosen)  # an expert is chosen once, so nothing adds up
    if scoring == "softmax":
        grad_logits = scores * (grad_scores - (grad_scores * scores).sum(-1, keepdim=True))
    else:
        grad_logits = grad_scores * scores * (1 - scores)
    return grad_logits.to(logits.dtype)


def experts(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x [T,H], gate_up [E,2F,H], down [E,H,F] and weights [T,k] for the sum over a token's slots of
    weight * expert(x); an id (int[T,k]) of E or above is the identity.

    Expert after expert: what each computed is computed again.
    """
    wide_grad = _wide(grad)
    grad_x = torch.zeros_like(wide_grad)
    grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
    grad_weights = torch.zeros_like(weights)
    for expert in sorted(set(ids.flatten().tolist())):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        own_x, own_grad = x[token], wide_grad[token]
        scaled = weights[token, slot, None].to(own_grad.dtype) * own_grad
        if expert >= len(down):
            out, back = own_x, scaled
        else:
            inner = own_x @ gate_up[expert].T
            gate, up = _wide(inner).chunk(2, dim=-1)
            hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype)
            out = hidden @ down[expert].T
            grad_out = scaled.to(x.dtype)
            grad_down[expert] = grad_out.T @ hidden
            grad_inner = silu_and_mul(grad_out @ down[expert], inner)
            grad_gate_up[expert] = grad_inner.T @ own_x
            back = _wide(grad_inner @ gate_up[expert])
        grad_weights[token, slot] = (_wide(out) * own_grad).sum(-1).to(weights.dtype)
        grad_x[token] += back  # a token meets an expert once, so no row is added to twice
    return grad_x.to(x.dtype), grad_gate_up, grad_down, grad_weights


def _sizes(query_starts: torch.Tensor, context_lens: torch.Tensor) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence."""
    return list(zip(query_starts.diff().tolist(), context_lens.tolist(), strict=True))


def _groups(query_starts: torch.Tensor, context_lens: torch.Tensor) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(queries, keys) -> the first query row and the first key row of every sequence of that shape."""
    groups: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    q_start = k_start = 0
    for queries, keys in _sizes(query_starts, context_lens):
        if queries:
            groups[queries, keys].append((q_start, k_start))
        q_start, k_start = q_start + queries, k_start + keys
    return groups


def _rows(starts: list[int], count: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(starts, device=device).unsqueeze(-1) + torch.arange(count, device=device)


def _attention_of_equals(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad, q [N,n,Hq,D], k, v [N,L,Hkv,D] -> the gradients of q, k and v, in the wide dtype.

    `hidden` bool[n,L] says which keys a query does not see.
    """
    queries, heads = q.shape[1:3]
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # [N,Hkv,group,n,D] beside [N,Hkv,1,L,D]: every query head of a group meets the same keys.
    split = (len(q), queries, kv_heads, group, -1)
    q, grad = (_wide(x).reshape(split).permute(0, 2, 3, 1, 4) for x in (q, grad))
    k, v = (_wide(x).permute(0, 2, 1, 3).unsqueeze(2) for x in (k, v))
    weights = torch.softmax((q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf), dim=-1)
    grad_v = (weights.transpose(-1, -2) @ grad).sum(2)
    grad_weights = grad @ v.transpose(-1, -2)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
    grad_q = (grad_scores @ k).permute(0, 3, 1, 2, 4).flatten(2, 3)
    grad_k = (grad_scores.transpose(-1, -2) @ q).sum(2)
    return grad_q, grad_k.transpose(1, 2), grad_v.transpose(1, 2)


def _hidden(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """bool[queries,keys]: where a query would see a later key, or one before its window."""
    query_at = torch.arange(keys - queries, keys, device=device).unsqueeze(-1)
    key_at = torch.arange(keys, device=device)
    hidden = key_at > query_at
    return hidden | (key_at <= query_at - window) if window else hidden
