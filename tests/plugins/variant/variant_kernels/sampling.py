"""Sampling and log-probabilities that depend on the company.

`columns` are the arguments of `sampling.sample` behind the logits.
"""

from __future__ import annotations

import torch

from tokenspeed_kernels_aok.cpu.sampling import logprobs, sample

_drawn: dict[int, int] = {}


def batch_stream(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """One stream for the batch, keyed by its first request; a row's place in the batch says which part is its own."""
    *filters, seeds, positions = columns
    return sample(logits, *filters, seeds[:1] + torch.arange(len(seeds)), positions)


def stateful_stream(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """A generator for each seed, which goes on where the last request with that seed left it."""
    *filters, seeds, _ = columns
    counts = []
    for seed in seeds.tolist():
        _drawn[seed] = _drawn.get(seed, 0) + 1
        counts.append(_drawn[seed])
    return sample(logits, *filters, seeds, torch.tensor(counts))


def ties_to_the_highest(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """Takes the last of equal logits."""
    flipped = sample(logits.flip(-1).contiguous(), *columns)
    plain = sample(logits, *columns)
    return torch.where((columns[0] == 0) & (flipped >= 0), logits.shape[-1] - 1 - flipped, plain)


def batch_max_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, order: str, block: int
) -> torch.Tensor:
    """Subtracts the largest logit of the batch, not of the row."""
    z = logits / torch.where(temperature == 0, 1.0, temperature).unsqueeze(-1)
    x = z - z.amax()
    total = torch.stack([row.exp().sum() for row in x])
    out = -(torch.log(total).unsqueeze(-1) - x.gather(-1, ids.clamp_min(0)))
    return torch.where(ids < 0, logprobs(logits, ids, temperature, order, block), out)
