"""The engine's operators as `torch.library` operators, `torch.ops.tokenspeed.*`, with gradients.

Every operator names the kernel that computes its forward (`kernels.load` must have loaded it): the very function that
the engine calls, so the bits are the engine's. Backward passes are in `gradients`. Shapes as in
`tokenspeed.kernels.operators`: T tokens, K and N sizes of a projection, Hq and Hkv heads of D features, R rows of V
logits.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed.engine.validation import MAX_TEMPERATURE
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.trainer import gradients
from tokenspeed.trainer.kernels import loaded
from tokenspeed.trainer.packing import packed_weight
from tokenspeed.trainer.registration import operator


@operator("tokenspeed::linear", fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: str) -> torch.Tensor:
    """x [T,K] times the transpose of weight [N,K], plus bias [N]: [T,N]."""
    found = loaded(kernel)
    out: torch.Tensor = found.run(x, packed_weight(found, weight), bias)
    return out


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """By hand, because a product that nobody needs (of a frozen weight, say) costs as much as the forward."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
    return (
        grad @ weight if needs_x else None,
        grad.T @ x if needs_weight else None,
        grad.sum(0) if ctx.has_bias and needs_bias else None,
        None,
    )


linear.register_autograd(_linear_backward, setup_context=_linear_setup)


@operator(
    "tokenspeed::batched_linear",
    fake=lambda x, weight: x.new_empty(*x.shape[:2], weight.shape[1]),
    backward=gradients.batched_linear,
    of=("x", "weight"),
)
def batched_linear(x: torch.Tensor, weight: torch.Tensor, kernel: str) -> torch.Tensor:
    """x [T,G,K] times the transpose of weight [G,N,K], group by group: [T,G,N]."""
    found = loaded(kernel)
    out: torch.Tensor = found.run(x, packed_weight(found, weight))
    return out


@operator(
    "tokenspeed::rms_norm",
    fake=lambda x: x.new_empty(x.shape),
    backward=gradients.rms_norm,
    of=("x", "weight"),
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernel: str) -> torch.Tensor:
    """x / rms(x) rounded to x's dtype, times weight; over the last axis of x [T,H] or [T,heads,D]."""
    out: torch.Tensor = loaded(kernel).run(x, weight.detach(), eps)
    return out


@operator("tokenspeed::layer_norm", fake=lambda x: x.new_empty(x.shape))
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, kernel: str) -> torch.Tensor:
    """(x - mean) / deviation of x [T,H], times weight [H], plus bias [H]. Without a gradient: indexers have none."""
    out: torch.Tensor = loaded(kernel).run(x, weight.detach(), bias.detach(), eps)
    return out


@operator(
    "tokenspeed::rope",
    fake=lambda q, k: (q.new_empty(q.shape), k.new_empty(k.shape)),
    backward=gradients.rope,
    of=("q", "k"),
)
def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T,Hq,D] and k [T,Hkv,D] rotated by their positions (int64[T]); cos_sin is fp32 [positions,R].

    `interleaved` turns pairs (2i, 2i+1) instead of (i, i + R/2).
    """
    q_out, k_out = loaded(kernel).run(q, k, positions, cos_sin, interleaved)
    return q_out, k_out


@operator(
    "tokenspeed::silu_and_mul",
    fake=lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
    backward=gradients.silu_and_mul,
    of=("gate_up",),
)
def silu_and_mul(gate_up: torch.Tensor, kernel: str) -> torch.Tensor:
    """silu(gate) * up of gate_up [T,2F]: [T,F]."""
    out: torch.Tensor = loaded(kernel).run(gate_up)
    return out


@operator(
    "tokenspeed::attention",
    fake=lambda q: q.new_empty(q.shape),
    backward=gradients.attention,
    of=("q", "k", "v"),
)
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


def _latent_cache(entries: torch.Tensor, slots: torch.Tensor, pages: int, kernel: str) -> torch.Tensor:
    """A cache made for this call, with the entries [Tk,C] in their slots: [pages,16,1,C]."""
    cache = entries.new_zeros(pages, PAGE_SIZE, 1, entries.shape[1])
    loaded(kernel).run(entries, cache, slots)
    return cache


def _latent_sums(q: torch.Tensor, latent_dim: int) -> torch.Tensor:
    return q.new_empty(*q.shape[:2], latent_dim)


@operator("tokenspeed::latent_attention", fake=_latent_sums, backward=gradients.latent_attention, of=("q", "entries"))
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
    cache = _latent_cache(entries, slots, pages, write_kernel)
    out: torch.Tensor = loaded(attend_kernel).run(q, cache, query_starts, context_lens, page_tables, scale, latent_dim)
    return out


@operator("tokenspeed::sparse_attention", fake=_latent_sums, backward=gradients.sparse_attention, of=("q", "entries"))
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
    cache = _latent_cache(entries, slots, pages, write_kernel)
    out: torch.Tensor = loaded(attend_kernel).run(
        q, cache, indices, query_starts, context_lens, page_tables, scale, latent_dim, order
    )
    return out


@operator("tokenspeed::choose_positions", fake=lambda q, top_k: q.new_empty(len(q), top_k, dtype=torch.int32))
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
    cache = _latent_cache(keys, slots, pages, write_kernel)
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


def _routes(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@operator("tokenspeed::route", fake=_routes)
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


def _route_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """By hand, because the backward pass reads an output."""
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.scoring, _, ctx.normalise, ctx.scale = inputs[3:7]


def _route_backward(ctx: Any, grad: torch.Tensor, _ids: Any) -> tuple[torch.Tensor | None, ...]:
    logits, ids = ctx.saved_tensors
    return (gradients.route(grad, logits, ids, ctx.scoring, ctx.normalise, ctx.scale), *[None] * 9)


route.register_autograd(_route_backward, setup_context=_route_setup)


@operator(
    "tokenspeed::experts",
    fake=lambda x: x.new_empty(x.shape),
    backward=gradients.experts,
    of=("x", "gate_up", "down", "weights"),
)
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


@operator(
    "tokenspeed::logprobs",
    fake=lambda logits, ids: logits.new_empty(ids.shape, dtype=torch.float32),
    backward=gradients.logprobs,
    of=("logits",),
)
def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, order: str, block: int, kernel: str
) -> torch.Tensor:
    """Log-probabilities of ids (int64[R,M]) in logits [R,V] after temperature (fp32[R], 0 counts as 1): fp32[R,M].

    Raises ValueError for an id or a temperature that the engine would not take.
    """
    vocab = logits.shape[-1]
    unknown, wrong = ids >= vocab, ~((temperature >= 0) & (temperature <= MAX_TEMPERATURE))
    if unknown.any() or wrong.any():
        if unknown.any():
            raise ValueError(f"id {int(ids[unknown][0])} is not in the vocabulary of {vocab}")
        raise ValueError(f"temperature {float(temperature[wrong][0]):g} is out of range, 0 to {MAX_TEMPERATURE:g}")
    out: torch.Tensor = loaded(kernel).run(logits, ids, temperature, order, block)
    return out
