"""The engine's operators as `torch.library` operators, `torch.ops.tokenspeed.*`, with gradients.

Every operator names the kernel that computes its forward (`kernels.load` must have loaded it): the very function that
the engine calls, so the bits are the engine's. Backward passes are in `gradients`. Shapes as in
`tokenspeed.kernels.operators`: T tokens, K and N sizes of a projection, Hq and Hkv heads of D features, R rows of V
logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.trainer import gradients
from tokenspeed.trainer.kernels import loaded
from tokenspeed.trainer.packing import packed_weight


@custom_op("tokenspeed::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: str) -> torch.Tensor:
    """x [T,K] times the transpose of weight [N,K], plus bias [N]: [T,N]."""
    found = loaded(kernel)
    out: torch.Tensor = found.run(x, packed_weight(found, weight), bias)
    return out


@linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: str) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
    return (
        grad @ weight if needs_x else None,
        grad.T @ x if needs_weight else None,
        grad.sum(0) if ctx.has_bias and needs_bias else None,
        None,
    )


linear.register_autograd(_linear_backward, setup_context=_linear_setup)


@custom_op("tokenspeed::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernel: str) -> torch.Tensor:
    """x / rms(x) rounded to x's dtype, times weight; over the last axis of x [T,H] or [T,heads,D]."""
    out: torch.Tensor = loaded(kernel).run(x, weight.detach(), eps)
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, kernel: str) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    x, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return (*gradients.rms_norm(grad, x, weight, ctx.eps), None, None)


rms_norm.register_autograd(_rms_norm_backward, setup_context=_rms_norm_setup)


@custom_op("tokenspeed::rope", mutates_args=())
def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T,Hq,D] and k [T,Hkv,D] rotated by their positions (int64[T]); cos_sin is fp32 [positions,R].

    `interleaved` turns pairs (2i, 2i+1) instead of (i, i + R/2).
    """
    q_out, k_out = loaded(kernel).run(q, k, positions, cos_sin, interleaved)
    return q_out, k_out


@rope.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,  # noqa: ARG001
    cos_sin: torch.Tensor,  # noqa: ARG001
    interleaved: bool,  # noqa: ARG001
    kernel: str,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[2], inputs[3])
    ctx.interleaved = inputs[4]


def _rope_backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    positions, cos_sin = ctx.saved_tensors
    back = [gradients.rotate_back(grad, positions, cos_sin, ctx.interleaved) for grad in (grad_q, grad_k)]
    return (*back, None, None, None, None)


rope.register_autograd(_rope_backward, setup_context=_rope_setup)


@custom_op("tokenspeed::silu_and_mul", mutates_args=())
def silu_and_mul(gate_up: torch.Tensor, kernel: str) -> torch.Tensor:
    """silu(gate) * up of gate_up [T,2F]: [T,F]."""
    out: torch.Tensor = loaded(kernel).run(gate_up)
    return out


@silu_and_mul.register_fake
def _(gate_up: torch.Tensor, kernel: str) -> torch.Tensor:  # noqa: ARG001
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _silu_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0])


def _silu_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return gradients.silu_and_mul(grad, *ctx.saved_tensors), None


silu_and_mul.register_autograd(_silu_backward, setup_context=_silu_setup)


@custom_op("tokenspeed::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    slots: torch.Tensor,
    pages: int,
    scale: float,
    window: int,
    write_kernel: str,
    attend_kernel: str,
) -> torch.Tensor:
    """Causal attention of ragged queries q [Tq,Hq,D] over their sequences' keys and values [Tk,Hkv,D]: [Tq,Hq,D].

    Keys and values lie sequence after sequence and are written to a paged cache of `pages` pages made for this call,
    key i to slot `slots[i]`; `query_starts`, `context_lens` and `page_tables` are those of `attention.paged`.
    """
    shape = (pages, PAGE_SIZE, *k.shape[1:])
    k_cache, v_cache = k.new_zeros(shape), v.new_zeros(shape)
    loaded(write_kernel).run(k, v, k_cache, v_cache, slots)
    out: torch.Tensor = loaded(attend_kernel).run(
        q, k_cache, v_cache, query_starts, context_lens, page_tables, scale, window
    )
    return out


@attention.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(q.shape)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:5])
    ctx.scale, ctx.window = inputs[8:10]


def _attention_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v, query_starts, context_lens = ctx.saved_tensors
    counts = query_starts.diff().tolist(), context_lens.tolist()
    return (*gradients.attention(grad, q, k, v, *counts, ctx.scale, ctx.window), *[None] * 9)


attention.register_autograd(_attention_backward, setup_context=_attention_setup)


@custom_op("tokenspeed::batched_linear", mutates_args=())
def batched_linear(x: torch.Tensor, weight: torch.Tensor, kernel: str) -> torch.Tensor:
    """x [T,G,K] times the transpose of weight [G,N,K], group by group: [T,G,N]."""
    found = loaded(kernel)
    out: torch.Tensor = found.run(x, packed_weight(found, weight))
    return out


@batched_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, kernel: str) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:2], weight.shape[1])


def _batched_linear_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:2])


def _batched_linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*gradients.batched_linear(grad, *ctx.saved_tensors), None)


batched_linear.register_autograd(_batched_linear_backward, setup_context=_batched_linear_setup)


@custom_op("tokenspeed::latent_attention", mutates_args=())
def latent_attention(
    q: torch.Tensor,
    entries: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    slots: torch.Tensor,
    pages: int,
    scale: float,
    latent_dim: int,
    write_kernel: str,
    attend_kernel: str,
) -> torch.Tensor:
    """Causal attention of ragged queries q [Tq,Hq,C] over compressed entries [Tk,C], of which the first R =
    `latent_dim` values are summed: [Tq,Hq,R].

    Entries lie sequence after sequence and are written to a paged cache made for this call, as in `attention`.
    """
    cache = entries.new_zeros(pages, PAGE_SIZE, 1, entries.shape[1])
    loaded(write_kernel).run(entries, cache, slots)
    out: torch.Tensor = loaded(attend_kernel).run(q, cache, query_starts, context_lens, page_tables, scale, latent_dim)
    return out


@latent_attention.register_fake
def _(
    q: torch.Tensor,
    entries: torch.Tensor,  # noqa: ARG001
    query_starts: torch.Tensor,  # noqa: ARG001
    context_lens: torch.Tensor,  # noqa: ARG001
    page_tables: torch.Tensor,  # noqa: ARG001
    slots: torch.Tensor,  # noqa: ARG001
    pages: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    latent_dim: int,
    *_: Any,
) -> torch.Tensor:
    return q.new_empty(*q.shape[:2], latent_dim)


def _latent_attention_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:4])
    ctx.scale, ctx.latent_dim = inputs[7:9]


def _latent_attention_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, entries, query_starts, context_lens = ctx.saved_tensors
    counts = query_starts.diff().tolist(), context_lens.tolist()
    return (*gradients.latent_attention(grad, q, entries, *counts, ctx.scale, ctx.latent_dim), *[None] * 9)


latent_attention.register_autograd(_latent_attention_backward, setup_context=_latent_attention_setup)


@custom_op("tokenspeed::sparse_attention", mutates_args=())
def sparse_attention(
    q: torch.Tensor,
    entries: torch.Tensor,
    indices: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    slots: torch.Tensor,
    pages: int,
    scale: float,
    latent_dim: int,
    order: str,
    write_kernel: str,
    attend_kernel: str,
) -> torch.Tensor:
    """`latent_attention` of each query over the positions indices int32[Tq,k] of its sequence; `order` as in
    `attention.sparse_paged`."""
    cache = entries.new_zeros(pages, PAGE_SIZE, 1, entries.shape[1])
    loaded(write_kernel).run(entries, cache, slots)
    out: torch.Tensor = loaded(attend_kernel).run(
        q, cache, indices, query_starts, context_lens, page_tables, scale, latent_dim, order
    )
    return out


@sparse_attention.register_fake
def _(
    q: torch.Tensor,
    entries: torch.Tensor,  # noqa: ARG001
    indices: torch.Tensor,  # noqa: ARG001
    query_starts: torch.Tensor,  # noqa: ARG001
    context_lens: torch.Tensor,  # noqa: ARG001
    page_tables: torch.Tensor,  # noqa: ARG001
    slots: torch.Tensor,  # noqa: ARG001
    pages: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    latent_dim: int,
    *_: Any,
) -> torch.Tensor:
    return q.new_empty(*q.shape[:2], latent_dim)


def _sparse_attention_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:5])
    ctx.scale, ctx.latent_dim = inputs[8:10]


def _sparse_attention_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, entries, indices, query_starts, context_lens = ctx.saved_tensors
    counts = query_starts.diff().tolist(), context_lens.tolist()
    parts = gradients.sparse_attention(grad, q, entries, indices, *counts, ctx.scale, ctx.latent_dim)
    return (*parts, *[None] * 11)


sparse_attention.register_autograd(_sparse_attention_backward, setup_context=_sparse_attention_setup)


@custom_op("tokenspeed::layer_norm", mutates_args=())
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, kernel: str) -> torch.Tensor:
    """(x - mean) / deviation of x [T,H], times weight [H], plus bias [H]. Without a gradient: indexers have none."""
    out: torch.Tensor = loaded(kernel).run(x, weight.detach(), bias.detach(), eps)
    return out


@layer_norm.register_fake
def _(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@custom_op("tokenspeed::choose_positions", mutates_args=())
def choose_positions(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    slots: torch.Tensor,
    pages: int,
    scale: float,
    top_k: int,
    write_kernel: str,
    score_kernel: str,
    choose_kernel: str,
) -> torch.Tensor:
    """The positions int32[Tq,k] that an indexer chooses, by its queries q [Tq,Hi,C] with weights fp32[Tq,Hi] that stand
    at positions int64[Tq], and its keys [Tk,C]. Sequence after sequence; without a gradient."""
    cache = keys.new_zeros(pages, PAGE_SIZE, 1, keys.shape[1])
    loaded(write_kernel).run(keys, cache, slots)
    choice = torch.empty(len(q), top_k, dtype=torch.int32, device=q.device)
    starts = query_starts.tolist()
    for sequence, length in enumerate(context_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        scores = loaded(score_kernel).run(
            q[rows],
            weights[rows],
            cache,
            query_starts[sequence : sequence + 2] - query_starts[sequence],
            context_lens[sequence : sequence + 1],
            page_tables[sequence : sequence + 1, : -(-length // PAGE_SIZE)],
            scale,
        )
        choice[rows] = loaded(choose_kernel).run(scores, positions[rows], top_k)
    return choice


@choose_positions.register_fake
def _(
    q: torch.Tensor,
    weights: torch.Tensor,  # noqa: ARG001
    keys: torch.Tensor,  # noqa: ARG001
    positions: torch.Tensor,  # noqa: ARG001
    query_starts: torch.Tensor,  # noqa: ARG001
    context_lens: torch.Tensor,  # noqa: ARG001
    page_tables: torch.Tensor,  # noqa: ARG001
    slots: torch.Tensor,  # noqa: ARG001
    pages: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    top_k: int,
    *_: Any,
) -> torch.Tensor:
    return q.new_empty(len(q), top_k, dtype=torch.int32)


@custom_op("tokenspeed::route", mutates_args=())
def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    form: str,
    normalise: bool,
    scale: float,
    groups: int,
    top_groups: int,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights, (fp32[T,k], int64[T,k]), from logits [T,E] and an fp32 bias [E].

    The arguments are those of `moe.route`. The choice has no gradient, nor has the bias that only it reads.
    """
    weights, ids = loaded(kernel).run(logits, bias, top_k, scoring, form, normalise, scale, groups, top_groups)
    return weights, ids.long()


@route.register_fake
def _(logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG001
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _route_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.scoring, _, ctx.normalise, ctx.scale = inputs[3:7]


def _route_backward(ctx: Any, grad: torch.Tensor, _ids: Any) -> tuple[torch.Tensor | None, ...]:
    logits, ids = ctx.saved_tensors
    return (gradients.route(grad, logits, ids, ctx.scoring, ctx.normalise, ctx.scale), *[None] * 9)


route.register_autograd(_route_backward, setup_context=_route_setup)


@custom_op("tokenspeed::experts", mutates_args=())
def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    order: str,
    kernel: str,
) -> torch.Tensor:
    """Sum over a token's slots of weight (fp32[T,k]) times its expert's (int64[T,k]) gated MLP of x [T,H]: [T,H].

    down [E,H,F] says how many experts there are; an id of E or above is the identity, and gate_up [.,2F,H] may have
    rows beyond E, which are not read. `order` as in `moe.experts`.
    """
    found = loaded(kernel)
    packed = packed_weight(found, gate_up, len(down)), packed_weight(found, down)
    out: torch.Tensor = found.run(x, *packed, weights, ids.int(), order)
    return out


@experts.register_fake
def _(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _experts_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:5])


def _experts_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*gradients.experts(grad, *ctx.saved_tensors), *[None] * 3)


experts.register_autograd(_experts_backward, setup_context=_experts_setup)


@custom_op("tokenspeed::logprobs", mutates_args=())
def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, order: str, block: int, kernel: str
) -> torch.Tensor:
    """Log-probabilities of ids (int64[R,M]) in logits [R,V] after temperature (fp32[R], 0 counts as 1): fp32[R,M]."""
    out: torch.Tensor = loaded(kernel).run(logits, ids, temperature, order, block)
    return out


@logprobs.register_fake
def _(logits: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(ids.shape, dtype=torch.float32)


def _logprobs_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:3])


def _logprobs_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (gradients.logprobs(grad, *ctx.saved_tensors), *[None] * 5)


logprobs.register_autograd(_logprobs_backward, setup_context=_logprobs_setup)
