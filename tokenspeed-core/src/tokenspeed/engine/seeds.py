"""Where the seed of every sample comes from. Pure integers; no torch, so the HTTP process can use it."""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1
# The increment and the two multipliers of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
# generators", figure 14 and the finaliser of the reference implementation by Vigna).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with `seed`: `seed` itself for sample 0, a 63-bit mix for the others.

    For index > 0 it is SplitMix64's finaliser of `seed + index * gamma` (mod 2**64), shifted right by one so that it
    is a valid `seed` of a later request: that request gives the same sample.
    """
    if index == 0:
        return seed
    z = (seed + index * _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return (z ^ (z >> 31)) >> 1


def fresh_seed() -> int:
    """A random 63-bit seed for a sample whose request names none; the reply reports it."""
    return secrets.randbits(63)


def sample_seeds(seed: int | None, n: int) -> list[int]:
    """Seeds of the `n` samples of one request: derived from its seed, or all fresh where it names none."""
    return [fresh_seed() if seed is None else derive_seed(seed, index) for index in range(n)]
