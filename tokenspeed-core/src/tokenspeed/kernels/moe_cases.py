"""Measured calls of `moe.route`, `moe.experts` and `attention.mla_paged`, in shapes of small and large models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from tokenspeed import huge_pages
from tokenspeed.kernels.case import COLD_BYTES, Call, Case, Kernel, calling, need, running
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.kernels.reference.moe import route

EXPERT_SHAPES = ((32, 4, 512, 256), (128, 8, 2048, 768))
"""(experts, chosen, hidden, intermediate): a small Qwen3-MoE, and Qwen3-30B-A3B."""

LATENT_SHAPES = ((8, 128, 32), (16, 512, 64))
"""(heads, latent, rotated): a small DeepSeek-V3, and a share of the heads of the large one."""

LATENT_CONTEXTS = (512, 4096)
MOST_CACHE_BYTES = 256 << 20


def routing(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """Softmax, the k best, normalised."""

    def plain(logits: torch.Tensor, k: int) -> object:
        weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), k)
        return weights / weights.sum(-1, keepdim=True), ids

    for experts, k, _, _ in EXPERT_SHAPES:
        for m in rows:
            logits = torch.randn(m, experts).to(dtype)
            yield Case(
                need("moe.route", dtype, "logits", experts=experts, top_k=k),
                f"E={experts} k={k} T={m}",
                running(logits, None, k, "softmax", "torch"),
                calling(plain, logits, k),
                read_bytes=logits.nbytes,
            )


def grouped_experts(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """Random choices over several cold layers; what is read are the weights of the experts that somebody chose.

    torch's yardstick takes the chosen experts one after another, each over its own rows.
    """
    for experts, k, hidden, intermediate in EXPERT_SHAPES:
        layer_bytes = 3 * experts * hidden * intermediate * dtype.itemsize
        layers = []
        for _ in range(max(1, COLD_BYTES // layer_bytes)):
            gate_up, down = torch.randn(experts, 2 * intermediate, hidden), torch.randn(experts, hidden, intermediate)
            layers.append((huge_pages.copied((gate_up * 0.02).to(dtype)), huge_pages.copied((down * 0.02).to(dtype))))
        for m in rows:
            x = torch.randn(m, hidden).to(dtype)
            weights, ids = route(torch.randn(m, experts), None, k, "softmax", "torch")
            used = torch.unique(ids).long()
            yield Case(
                need("moe.experts", dtype, "x", "weight", experts=experts, hidden=hidden, intermediate=intermediate),
                f"E={experts} k={k} H={hidden} F={intermediate} T={m} used={len(used)}",
                _running_experts(layers, x, weights, ids),
                _plain_experts(layers, x, weights, ids),
                read_bytes=len(used) * layer_bytes // experts,
                flops=6 * m * k * hidden * intermediate,
                memory=[
                    span for gate_up, _ in layers for span in _spans(gate_up, 3 * len(used) * hidden * intermediate)
                ],
            )


def _spans(weight: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`weight` cut into vectors of `count` elements, or of all that it has; without the rest."""
    flat = weight.view(-1)
    size = min(count, len(flat))
    return list(flat[: len(flat) // size * size].view(-1, size))


def _running_experts(
    layers: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> Callable[[Kernel], Call]:
    def bind(kernel: Kernel) -> Call:
        run, packed = kernel.run, [(kernel.prepare(gate_up), kernel.prepare(down)) for gate_up, down in layers]
        return lambda i: run(x, *packed[i % len(packed)], weights, ids, "slot")

    return bind


def _plain_experts(
    layers: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> Call:
    def call(i: int) -> object:
        gate_up, down = layers[i % len(layers)]
        out = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, down[expert]) * weights[token, slot, None]
            out.index_add_(0, token, y.to(x.dtype))
        return out

    return call


def latent_decode(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """One query for each of `rows` sequences; torch gathers pages, then attends with heads as queries of one."""
    for heads, latent, rotated in LATENT_SHAPES:
        width = latent + rotated
        for context in LATENT_CONTEXTS:
            for batch in rows:
                if batch * context * width * dtype.itemsize > MOST_CACHE_BYTES:
                    continue
                pages = batch * context // PAGE_SIZE
                cache = torch.randn(pages, PAGE_SIZE, 1, width).to(dtype)
                tables = torch.randperm(pages, dtype=torch.int32).view(batch, -1)
                q = torch.randn(batch, heads, width).to(dtype)
                starts, lengths = torch.arange(batch + 1).int(), torch.full((batch,), context).int()
                yield Case(
                    need("attention.mla_paged", dtype, "x", "kv", heads=heads, latent_dim=latent, width=width),
                    f"decode heads={heads} R={latent} C={width} context={context} B={batch}",
                    running(q, cache, starts, lengths, tables, width**-0.5, latent),
                    calling(_gather_then_attend, q, cache, tables.long(), latent),
                    read_bytes=cache.nbytes,
                    flops=2 * batch * heads * context * (width + latent),
                    memory=[cache],
                )


def _gather_then_attend(q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, latent: int) -> object:
    keys = cache[tables].flatten(1, 3).unsqueeze(1)  # [B,1,context,C]
    return F.scaled_dot_product_attention(q.unsqueeze(1), keys, keys[..., :latent])
