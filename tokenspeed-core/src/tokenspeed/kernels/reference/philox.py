"""Philox4x32-10 and the Gumbel noise of the per-request sampling stream, in integer torch.

The noise of a token is a pure function of (seed, position, token id). Source of the generator and its constants:
Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four 32-bit words (each held in an int64) for each counter; all operands are int64 in [0, 2^32) and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(constant: int, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low half of the 64-bit product, in 16-bit steps so that no int64 overflows."""
    low = constant * (value & 0xFFFF)
    high = constant * (value >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def uniform(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """fp32 in (0, 1) for each of `token_ids` (int64[N]).

    Key: the low and the high word of the seed. Counter: (id >> 2, 0, low and high word of the position). The id's last
    two bits pick the output word w, and u = ((w >> 9) + 0.5) * 2^-23, which is exact in fp32.
    """
    quad = token_ids >> 2
    words = philox4x32(
        (
            quad,
            torch.zeros_like(quad),
            torch.full_like(quad, position & _LOW),
            torch.full_like(quad, position >> 32 & _LOW),
        ),
        (torch.full_like(quad, seed & _LOW), torch.full_like(quad, seed >> 32 & _LOW)),
    )
    word = torch.stack(words, dim=-1).gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1)
    return ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)) in fp32 for each of `token_ids`."""
    return -torch.log(-torch.log(uniform(seed, position, token_ids)))
