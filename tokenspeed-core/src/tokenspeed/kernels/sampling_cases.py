"""Measured calls of the `sampling.*` operators over the vocabulary of Qwen3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tokenspeed.kernels.case import Case, calling, need, running

VOCABULARY = 151_936
BLOCK = 32_768
MOST_ROWS = 64
"""Larger numbers of rows are left out."""


def _logits(rows: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    for m in rows:
        if m <= MOST_ROWS:
            yield m, (3 * torch.randn(m, VOCABULARY)).to(dtype)


def block_sums(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """Sums of exponentials in blocks of 32,768."""

    def plain(logits: torch.Tensor, row_max: torch.Tensor) -> list[torch.Tensor]:
        return [part.sum(-1) for part in torch.split(torch.exp(logits.float() - row_max[:, None]), BLOCK, dim=-1)]

    for m, logits in _logits(rows, dtype):
        row_max = logits.float().amax(-1)
        yield Case(
            need("sampling.block_sumexp", dtype, "logits"),
            f"V={VOCABULARY} R={m}",
            running(logits, row_max, torch.ones(m), BLOCK),
            calling(plain, logits, row_max),
            read_bytes=logits.nbytes,
        )


def logprobs(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """The logprob of one token of each row, in both orders; torch's is log_softmax and gather."""

    def plain(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids)

    for m, logits in _logits(rows, dtype):
        ids = torch.randint(0, VOCABULARY, (m, 1))
        for order in ("torch", "megatron"):
            yield Case(
                need("sampling.logprobs", dtype, "logits"),
                f"{order} V={VOCABULARY} R={m}",
                running(logits, ids, torch.ones(m), order, BLOCK),
                calling(plain, logits, ids),
                read_bytes=logits.nbytes,
            )


def sampling(rows: Sequence[int], dtype: torch.dtype) -> Iterator[Case]:
    """Greedy, all tokens, and top-p 0.9; torch draws by the Gumbel maximum too, and finds the nucleus by a sort."""

    def greedy(logits: torch.Tensor) -> torch.Tensor:
        return logits.float().argmax(-1)

    def whole(logits: torch.Tensor) -> torch.Tensor:
        z = logits.float()
        return (z - (-torch.rand_like(z).log()).log()).argmax(-1)

    def nucleus(logits: torch.Tensor) -> torch.Tensor:
        z, order = logits.float().sort(dim=-1, descending=True, stable=True)
        weights = z.softmax(-1)
        kept = weights.cumsum(-1) - weights < 0.9
        noisy = torch.where(kept, z - (-torch.rand_like(z).log()).log(), -torch.inf)
        return order.gather(-1, noisy.argmax(-1, keepdim=True))

    ways = (("greedy", 0.0, 1.0, greedy), ("T=1", 1.0, 1.0, whole), ("top-p 0.9", 1.0, 0.9, nucleus))
    for m, logits in _logits(rows, dtype):
        for name, temperature, top_p, plain in ways:
            yield Case(
                need("sampling.sample", dtype, "logits"),
                f"{name} V={VOCABULARY} R={m}",
                running(
                    logits,
                    torch.full((m,), temperature),
                    torch.zeros(m, dtype=torch.int32),
                    torch.full((m,), top_p),
                    torch.zeros(m),
                    torch.arange(m),
                    torch.arange(m) + 100,
                ),
                calling(plain, logits),
                read_bytes=logits.nbytes,
            )
