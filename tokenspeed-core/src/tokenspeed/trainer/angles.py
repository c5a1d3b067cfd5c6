"""The rotary angles of an adopted model, made for the positions that its sequences reach."""

from __future__ import annotations

import torch

from tokenspeed.layers.rope import RopeScaling, cos_sin_table


class Angles:
    """A table of cosines and sines that grows with the sequences.

    A configuration may state a context far beyond what anybody trains with, and there is no option that says less.
    A row's bits do not depend on the number of rows.
    """

    def __init__(self, scaling: RopeScaling, rotary_dim: int) -> None:
        self._scaling = scaling
        self._rotary_dim = rotary_dim
        self._table = cos_sin_table(scaling, rotary_dim, 0)

    def table(self, positions: int, device: torch.device) -> torch.Tensor:
        """fp32[positions,R] on `device`, computed on the host.

        Never more rows: a checkpointed layer that is computed again must see the shapes that it saw before.
        """
        table = self._table
        if len(table) < positions:
            table = cos_sin_table(self._scaling, self._rotary_dim, 1 << (positions - 1).bit_length())
        if table.device != device:
            table = table.to(device)
        self._table = table
        return table[:positions]
