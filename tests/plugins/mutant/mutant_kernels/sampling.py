"""Sampling and log-probabilities. `columns` are the arguments of `sampling.sample` behind the logits."""

from __future__ import annotations

import torch

from tokenspeed.kernels.reference import sampling as reference


def _only_fp32(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32:
        raise TypeError(f"logits are {logits.dtype}")


def whole_row(logits: torch.Tensor, row_max: torch.Tensor, temperature: torch.Tensor, block: int) -> torch.Tensor:
    """One sum for the row, in the first block."""
    _only_fp32(logits)
    sums = reference.block_sumexp(logits, row_max, temperature, block)
    return torch.cat((sums.sum(-1, keepdim=True), torch.zeros_like(sums[:, 1:])), dim=-1)


def ignores_temperature(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, order: str, block: int
) -> torch.Tensor:
    _only_fp32(logits)
    return reference.logprobs(logits, ids, torch.ones_like(temperature), order, block)


def noise_by_row(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """The stream of a row depends on its place in the batch, beyond the first ones."""
    _only_fp32(logits)
    *filters, seeds, positions = columns
    return reference.sample(logits, *filters, seeds + torch.arange(len(seeds)) // 8, positions)


def keeps_ties(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """Keeps every token that is as good as the k-th."""
    _only_fp32(logits)
    temperature, top_k, *others = columns
    kept = []
    for row, k in zip(logits, top_k.tolist(), strict=True):
        at_least = row.sort(descending=True).values[min(k, len(row)) - 1] if k else row.min()
        kept.append(int((row >= at_least).sum()))
    wide = torch.tensor(kept, dtype=torch.int32)
    return reference.sample(logits, temperature, wide, *others)
