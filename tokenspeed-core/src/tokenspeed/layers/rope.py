"""Rotary position embedding: frequencies from a model's configuration, and tables of cosines and sines.

Everything here is computed in fp32, by the same expressions whatever the model's device and dtype: on the host, and
then copied, or on the model's device, as the switch `yarn_ramp_mask_device` says. Types of scaling: `default`, `linear`
(kaiokendev), `llama3` (Llama 3.1), `yarn` (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.weights import WeightLayer


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies are made. Fields that a type does not use keep their default.

    `theta` is the base; `factor` stretches the positions; `original_positions` is the context before scaling;
    `low_freq_factor`, `high_freq_factor` belong to `llama3`; `attention_factor` (multiplies cosines and sines),
    `beta_fast`, `beta_slow`, `truncate` to `yarn`.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def inverse_frequencies(scaling: RopeScaling, rotary_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Angle per position of each rotated pair, fp32[rotary_dim / 2], computed on `device`."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).to(torch.float32) / rotary_dim
    wavelengths = scaling.theta**exponents
    if scaling.kind == "yarn":
        return _yarn(scaling, wavelengths, rotary_dim)
    frequencies = 1.0 / wavelengths
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(scaling, frequencies)
    return frequencies


def _llama3(scaling: RopeScaling, frequencies: torch.Tensor) -> torch.Tensor:
    """Short wavelengths stay, long ones are divided by the factor, those between are interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_positions / scaling.low_freq_factor
    shortest = scaling.original_positions / scaling.high_freq_factor
    smooth = scaling.original_positions / wavelengths - scaling.low_freq_factor
    smooth = smooth / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    long_or_between = torch.where(wavelengths > longest, frequencies / scaling.factor, between)
    return torch.where(wavelengths < shortest, frequencies, long_or_between)


def _yarn(scaling: RopeScaling, wavelengths: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """A linear ramp over the pairs between frequencies that stay and frequencies that are divided by the factor."""
    low = _pair_with_rotations(scaling.beta_fast, scaling, rotary_dim)
    high = _pair_with_rotations(scaling.beta_slow, scaling, rotary_dim)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32, device=wavelengths.device) - low) / width).clamp(0, 1)
    stays = 1 - ramp
    return 1.0 / (scaling.factor * wavelengths) * (1 - stays) + 1.0 / wavelengths * stays


def _pair_with_rotations(rotations: float, scaling: RopeScaling, rotary_dim: int) -> float:
    """Index (fractional) of the pair that turns `rotations` times over the original context."""
    turns = math.log(scaling.original_positions / (rotations * 2 * math.pi))
    return rotary_dim * turns / (2 * math.log(scaling.theta))


def cos_sin_table(
    scaling: RopeScaling, rotary_dim: int, positions: int | range, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """fp32[positions, rotary_dim], computed on `device`: cosines in the first half of a row, sines in the second.

    `positions` are the first so many, or a range of them. A row's bits do not depend on which others are asked for.
    """
    wanted = range(positions) if isinstance(positions, int) else positions
    frequencies = inverse_frequencies(scaling, rotary_dim, device)
    index = torch.arange(wanted.start, wanted.stop, wanted.step, dtype=torch.int64, device=device)
    angles = torch.outer(index.to(torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling.attention_factor


CERTIFIED_POSITIONS = 1 << 18
"""Most rows of a table that a certificate reads; of a model with a longer context, evenly spread ones."""


class RotaryEmbedding(WeightLayer):
    """Rotates queries and keys by their positions; one instance serves all layers of a model.

    The first `rotary_dim` features of a head are rotated, or all of them: with `interleaved` neighbours (2i, 2i+1),
    else features half as far apart. `max_positions` is the model's longest context; the table covers `positions`.
    """

    def __init__(
        self,
        ctx: LayerContext,
        scaling: RopeScaling,
        head_dim: int,
        max_positions: int,
        *,
        interleaved: bool = False,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.on_device = ctx.switches.get("yarn_ramp_mask_device", "model") == "model"
        self.scaling = scaling
        self.rotary_dim = rotary_dim or head_dim
        self.max_positions = max_positions
        self.positions = max_positions
        self.rope = ctx.operator(
            "rope.apply", dtypes={"x": ctx.dtype}, facts={"head_dim": head_dim, "rotary_dim": self.rotary_dim}
        )
        self.table: torch.Tensor | None = None

    def limit_context(self, tokens: int) -> None:
        self.positions = min(tokens, self.max_positions)

    def allocate(self, device: torch.device) -> None:
        self.table = self._table(range(self.positions), device)

    def tables(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Of the model's whole context: an engine with room for less of it computes the same bits.
        if self.table is not None:
            step = -(-self.max_positions // CERTIFIED_POSITIONS)
            yield "table", self._table(range(0, self.max_positions, step), self.table.device)

    def _table(self, positions: range, device: torch.device) -> torch.Tensor:
        made_on = device if self.on_device else torch.device("cpu")
        return cos_sin_table(self.scaling, self.rotary_dim, positions, made_on).to(device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T,Hq,D] and k [T,Hkv,D], rotated."""
        q_out, k_out = self.rope(q, k, positions, self.table, self.interleaved)
        return q_out, k_out
