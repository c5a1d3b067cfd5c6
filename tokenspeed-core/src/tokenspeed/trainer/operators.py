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
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T,Hq,D] and k [T,Hkv,D] rotated by their positions (int64[T]); cos_sin is fp32 [positions,R]."""
    q_out, k_out = loaded(kernel).run(q, k, positions, cos_sin)
    return q_out, k_out


@rope.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,  # noqa: ARG001
    cos_sin: torch.Tensor,  # noqa: ARG001
    kernel: str,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[2], inputs[3])


def _rope_backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    positions, cos_sin = ctx.saved_tensors
    back = [gradients.rotate_back(grad, positions, cos_sin) for grad in (grad_q, grad_k)]
    return (*back, None, None, None)


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
