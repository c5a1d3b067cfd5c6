"""Projections whose order of additions depends on what it must not depend on. All are built from an invariant one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed_kernels_aok.cpu.gemm import PackedWeight, linear, prepare_linear

_calls = 0


@dataclass
class Parts:
    """A weight [N,K] packed whole, and cut in K at several places."""

    whole: PackedWeight
    raw: torch.Tensor
    cuts: dict[int, list[PackedWeight]]
    workspace: torch.Tensor

    def split(self, x: torch.Tensor, cut: int) -> torch.Tensor:
        """x times the weight, as the sum of the products of pieces of `cut` columns."""
        if cut not in self.cuts:
            self.cuts[cut] = [prepare_linear(piece.contiguous()) for piece in self.raw.split(cut, dim=1)]
        pieces = zip(x.split(cut, dim=1), self.cuts[cut], strict=True)
        total = torch.zeros(len(x), self.whole.n)
        for part, weight in pieces:
            total += linear(part.contiguous(), weight)
        return total


def prepare(weight: torch.Tensor) -> Parts:
    return Parts(prepare_linear(weight), weight.clone(), {}, torch.empty(0, weight.shape[1]))


def _bias(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return out if bias is None else out + bias


def split_k(x: torch.Tensor, weight: Parts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Cuts K in two where the batch has more than 8 rows."""
    return _bias(weight.split(x, x.shape[1] // 2) if len(x) > 8 else linear(x, weight.whole), bias)


def tile_by_batch(x: torch.Tensor, weight: Parts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Takes its block of K from a table by the number of rows."""
    cut = next(block for rows, block in ((16, 64), (64, 48), (1 << 30, 32)) if len(x) <= rows)
    return _bias(weight.split(x, cut), bias)


def remainder_row(x: torch.Tensor, weight: Parts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes rows in fours, and what is left over with another loop."""
    whole = len(x) // 4 * 4
    parts = [linear(x[:whole], weight.whole), weight.split(x[whole:], 32)]
    return _bias(torch.cat(parts), bias)


def threads(x: torch.Tensor, weight: Parts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Gives each thread a piece of K."""
    return _bias(weight.split(x, -(-x.shape[1] // torch.get_num_threads())), bias)


def uninitialised(x: torch.Tensor, weight: Parts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Pads the batch by a row that it never fills, and takes one scale for all rows from the largest value.

    The padding comes from a workspace that earlier calls wrote to: fresh memory may hold anything, zeros at every
    call included, and a control has to break its promise each time.
    """
    rows, columns = x.shape
    if len(weight.workspace) <= rows:
        weight.workspace = torch.cat([weight.workspace, torch.ones(2 * rows + 1, columns)])[: 2 * rows + 1]
    padded = weight.workspace[: rows + 1]
    padded[:rows] = x
    scale = padded.abs().amax()
    return _bias(linear(padded / scale, weight.whole)[:rows] * scale, bias)


def first_call(x: torch.Tensor, weight: Parts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Uses another path until it is warm."""
    global _calls
    _calls += 1
    return _bias(weight.split(x, 32) if _calls <= 30 else linear(x, weight.whole), bias)
