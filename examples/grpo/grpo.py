"""Group-relative policy optimisation, and what can be compared between a rollout and the trainer's view of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CLIP = 0.2
"""A probability ratio beyond 1 +- this earns nothing more."""


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [prompts, samples], each against the mean and spread of its prompt's group."""
    spread = rewards.std(-1, keepdim=True)
    return (rewards - rewards.mean(-1, keepdim=True)) / (spread + 1e-4)


def loss(new: torch.Tensor, old: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The clipped objective over tokens: `new` and `old` log-probabilities, `weight` each token's advantage."""
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * weight, clipped * weight).mean()


@dataclass(frozen=True)
class Batch:
    """Prompts with their completions, padded on the right, and where the completions' tokens are.

    `input_ids`, `attention_mask` int64[B,S]; `rows`, `columns` int64[N] find the logits that predict the N completion
    tokens `targets`; `sample` int64[N] is the row of each.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> Batch:
        """One row for each pair."""
        width = max(len(a) + len(b) for a, b in zip(prompts, completions, strict=True))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        rows, columns, targets = [], [], []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            whole = prompt + completion
            ids[row, : len(whole)], mask[row, : len(whole)] = torch.tensor(whole), 1
            rows += [row] * len(completion)
            columns += range(len(prompt) - 1, len(whole) - 1)
            targets += completion
        return cls(ids, mask, torch.tensor(rows), torch.tensor(columns), torch.tensor(targets))


@dataclass(frozen=True)
class Mismatch:
    """How far the trainer's log-probabilities of the sampled tokens are from the ones the engine reported.

    `kl_k1`, `kl_k3` estimate the divergence of the trainer's policy from the engine's.
    """

    tokens: int
    differing_tokens: int
    max_abs_difference: float
    kl_k1: float
    kl_k3: float

    @classmethod
    def between(cls, engine: torch.Tensor, trainer: torch.Tensor) -> Mismatch:
        """Both float32[N], compared bit by bit."""
        differing = int((engine.view(torch.int32) != trainer.view(torch.int32)).sum())
        difference = engine.double() - trainer.double()
        k3 = torch.exp(-difference) - 1 + difference
        largest = float(difference.abs().max())
        return cls(len(engine), differing, largest, float(difference.mean()), float(k3.mean()))
