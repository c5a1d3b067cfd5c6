"""What `tokenspeed bench kernels` measures: model-shaped calls of operators, each with the same work in plain torch.

Names no vendor: a case asks for an operator like a layer does, and whichever kernel is selected gets measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tokenspeed import huge_pages
from tokenspeed.kernels.attention_cases import decode_and_prefill, writing
from tokenspeed.kernels.case import (
    COLD_BYTES,
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Call,
    Case,
    Kernel,
    calling,
    need,
    running,
)
from tokenspeed.kernels.moe_cases import grouped_experts, latent_decode, routing
from tokenspeed.kernels.sampling_cases import block_sums, logprobs, sampling
from tokenspeed.kernels.sparse_cases import choosing, layer_norm, scoring, sparse_decode

PROJECTIONS = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936), (4096, 14336))
"""(K, N) of Qwen3-0.6B (attention in and out, MLP up and down, output head) and of a layer of an 8B model."""


@dataclass
class ColdWeights:
    """Copies of one weight [N,K], more than the caches hold, plain and as each kernel packs them.

    The plain ones lie on large pages too: what is compared is kernels, not how memory was asked for.
    """

    k: int
    n: int
    dtype: torch.dtype
    plain: list[torch.Tensor] = field(init=False)
    _packed: dict[Callable[..., Any], list[Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        copies = max(1, -(-COLD_BYTES // (self.n * self.k * self.dtype.itemsize)))
        first = (torch.randn(self.n, self.k) * 0.02).to(self.dtype)
        self.plain = [huge_pages.copied(first) for _ in range(copies)]

    def packed(self, kernel: Kernel) -> list[Any]:
        """The copies as `kernel` prepares them, packed once."""
        if kernel.prepare not in self._packed:
            self._packed[kernel.prepare] = [kernel.prepare(weight) for weight in self.plain]
        return self._packed[kernel.prepare]

    def projecting(self, x: torch.Tensor) -> Callable[[Kernel], Call]:
        """x [M,K] times the transpose of the next copy at each call, by a kernel."""

        def bind(kernel: Kernel) -> Call:
            run, packed = kernel.run, self.packed(kernel)
            return lambda i: run(x, packed[i % len(packed)], None)

        return bind

    def projecting_plainly(self, x: torch.Tensor) -> Call:
        """The same by torch."""
        plain = self.plain
        return lambda i: F.linear(x, plain[i % len(plain)])


def cases(operators: Sequence[str], rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """The cases of `operators` (all when empty) for these numbers of rows; one at a time, since weights are large."""
    for operator, make in CASES.items():
        if not operators or operator in operators:
            yield from make(rows, dtype)


def _linear(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    for k, n in PROJECTIONS:
        weights = ColdWeights(k, n, dtype)
        for m in rows:
            x = torch.randn(m, k).to(dtype)
            yield Case(
                need("gemm.linear", dtype, "x", "weight", k=k, n=n),
                f"K={k} N={n} M={m}",
                weights.projecting(x),
                weights.projecting_plainly(x),
                read_bytes=n * k * dtype.itemsize,
                flops=2 * m * n * k,
                memory=weights.plain,
            )


def _embedding(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    table = torch.randn(50_000, HIDDEN).to(dtype)
    for m in rows:
        ids = torch.randint(0, len(table), (m,))
        yield Case(
            need("embedding.lookup", dtype, "weight"),
            f"H={HIDDEN} T={m}",
            running(ids, table),
            calling(F.embedding, ids, table),
            read_bytes=m * HIDDEN * dtype.itemsize,
        )


def _rms(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((HIDDEN,), (HEADS, HEAD_DIM)):
        weight = torch.rand(shape[-1]).to(dtype)
        for m in rows:
            x = torch.randn(m, *shape).to(dtype)
            yield Case(
                need("norm.rms", dtype, "x", "weight", hidden=shape[-1]),
                f"H={'x'.join(map(str, shape))} T={m}",
                running(x, weight, 1e-6),
                calling(F.rms_norm, x, weight.shape, weight, 1e-6),
                read_bytes=2 * x.nbytes,
            )


def _add_rms(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    weight = torch.rand(HIDDEN).to(dtype)

    def plain(x: torch.Tensor, residual: torch.Tensor) -> object:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, 1e-6), total

    for m in rows:
        x, residual = torch.randn(2, m, HIDDEN).to(dtype).unbind()
        yield Case(
            need("norm.add_rms", dtype, "x", "weight", hidden=HIDDEN),
            f"H={HIDDEN} T={m}",
            running(x, residual, weight, 1e-6),
            calling(plain, x, residual),
            read_bytes=4 * x.nbytes,
        )


def _rope(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    table = torch.randn(4096, HEAD_DIM)
    half = HEAD_DIM // 2

    def plain(q: torch.Tensor, k: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> object:
        return [x * cosine + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sine for x in (q, k)]

    for m in rows:
        q, k = (torch.randn(m, heads, HEAD_DIM).to(dtype) for heads in (HEADS, KV_HEADS))
        positions = torch.randint(0, len(table), (m,))
        cosine, sine = (part.repeat(1, 1, 2).to(dtype) for part in torch.split(table[positions][:, None], half, dim=-1))
        yield Case(
            need("rope.apply", dtype, "x", head_dim=HEAD_DIM, rotary_dim=HEAD_DIM),
            f"heads={HEADS}+{KV_HEADS} D={HEAD_DIM} T={m}",
            running(q, k, positions, table),
            calling(plain, q, k, cosine, sine),
            read_bytes=2 * (q.nbytes + k.nbytes),
        )


def _silu(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    def plain(gate_up: torch.Tensor) -> object:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    for m in rows:
        gate_up = torch.randn(m, 2 * FEED_FORWARD).to(dtype)
        yield Case(
            need("activation.silu_and_mul", dtype, "x"),
            f"F={FEED_FORWARD} T={m}",
            running(gate_up),
            calling(plain, gate_up),
            read_bytes=gate_up.nbytes * 3 // 2,
        )


CASES: Mapping[str, Callable[[Sequence[int], torch.dtype], Iterator[Case]]] = {
    "gemm.linear": _linear,
    "embedding.lookup": _embedding,
    "norm.rms": _rms,
    "norm.add_rms": _add_rms,
    "norm.layer": layer_norm,
    "rope.apply": _rope,
    "activation.silu_and_mul": _silu,
    "cache.write": writing,
    "attention.paged": decode_and_prefill,
    "attention.mla_paged": latent_decode,
    "attention.index_scores": scoring,
    "attention.index_topk": choosing,
    "attention.sparse_paged": sparse_decode,
    "moe.route": routing,
    "moe.experts": grouped_experts,
    "sampling.block_sumexp": block_sums,
    "sampling.logprobs": logprobs,
    "sampling.sample": sampling,
}
"""How the cases of each operator are made, in the order of the table."""
