"""`sampling.logprobs` in torch's own order of additions, for trainers that compute them with torch on a CPU.

Under `megatron` order every step is the one of Megatron's vocabulary-parallel cross entropy, down to the calls:
`torch.exp`, one `torch.sum` for each shard, the shards' sums added in the order of the ranks, `torch.log`. Under
`torch` order it is `torch.log_softmax` in fp32.

On a CPU torch adds up each contiguous row by itself, in an order that depends on its length and on how torch was built,
and on nothing else, with one exception: the sum of a *single* row is split over threads. Such a row is computed beside
a copy of itself. So a row's bits do not depend on the batch or the threads, which is what `batch_invariant` says; they
may depend on torch's version and instruction set, so the kernel publishes no bit order.
"""

from __future__ import annotations

import functools

import torch


def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, order: str, block: int
) -> torch.Tensor:
    """Log-probabilities of `ids` (int64[R,M]) after temperature (fp32[R], 0 counts as 1), fp32[R,M].

    `block` is the width of a shard of the padded vocabulary; padding counts as exact zeros. NaN for an id outside the
    vocabulary. Raises ValueError for an order other than `torch` and `megatron`.
    """
    if order not in ("torch", "megatron"):
        raise ValueError(f"logprob order {order!r} is not one of torch, megatron")
    rows, vocab = logits.shape
    if rows == 1:
        return logprobs(logits.expand(2, -1), ids.expand(2, -1), temperature.expand(2), order, block)[:1]
    divisor = torch.where(temperature == 0, torch.ones_like(temperature), temperature).unsqueeze(-1)
    z = (logits.to(torch.float32) / divisor).contiguous()
    inside = (ids >= 0) & (ids < vocab)
    safe_ids = ids.where(inside, 0)
    if order == "torch":
        out = torch.log_softmax(z, dim=-1).gather(-1, safe_ids)
    else:
        z -= z.amax(-1, keepdim=True)
        target = z.gather(-1, safe_ids)
        out = -(torch.log(_sum_of_shards(torch.exp(z), block)).unsqueeze(-1) - target)
    return out.masked_fill(~inside, torch.nan)


def _sum_of_shards(terms: torch.Tensor, block: int) -> torch.Tensor:
    """fp32[R]: each shard of `block` columns by `torch.sum`, then the shards from left to right."""
    padded = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % block))
    sums: list[torch.Tensor] = [shard.sum(-1) for shard in torch.split(padded, block, dim=-1)]
    return functools.reduce(torch.add, sums)


def variant() -> str:
    """What torch's order depends on: its version and the instruction set that it chose."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
