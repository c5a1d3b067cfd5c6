"""Layers that hold weights: which checkpoint tensors fill them, and how they are packed once, after loading.

A weight begins on the `meta` device (shape and dtype only), so a model can be planned without memory. Loading fills one
layer at a time and packs it as soon as it is complete, so no second copy of the model ever exists.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tokenspeed.errors import CheckpointError

CONVERTED = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that are converted into each other on loading."""


MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True)
class TensorTarget:
    """Where one checkpoint tensor goes: into `layer`'s parameter of that name, from row `start`, with this shape.

    `index` picks a part of the parameter first: an expert.
    """

    layer: WeightLayer
    parameter: str
    shape: tuple[int, ...]
    start: int = 0
    index: tuple[int, ...] = ()

    def takes(self, dtype: torch.dtype | None) -> bool:
        """Whether a tensor of this dtype can fill it: common floats are converted, another dtype must be the same."""
        own: torch.dtype = getattr(self.layer, self.parameter).dtype
        return dtype is not None and (dtype == own or {dtype, own} <= CONVERTED)

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy `tensor` in, converting its dtype; the layer must be allocated."""
        whole: torch.Tensor = getattr(self.layer, self.parameter).data
        whole = whole[self.index]
        whole[self.start : self.start + self.shape[0]].copy_(tensor)


@dataclass(frozen=True)
class Bundle:
    """A tensor that a trainer's model holds where a checkpoint has others: stacked experts, or another name.

    `shapes` it may have; `pieces` are the checkpoint's tensors, by name, and where in it each is.
    """

    shapes: tuple[tuple[int, ...], ...]
    pieces: Mapping[str, tuple[int | slice, ...]]


class WeightLayer(nn.Module):
    """A layer with parameters of its own. Subclasses create them with `new_weight` and pack them in `pack`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_prepared = False

    @staticmethod
    def new_weight(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        """A parameter without memory. Raises CheckpointError where no machine has as much."""
        if math.prod(shape) > MAX_ELEMENTS:
            raise CheckpointError(f"config.json: a weight of {list(shape)} is larger than the memory of any machine")
        return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)

    def choose_form(self, prefix: str, stored: Collection[str]) -> None:
        """For layers whose weights checkpoints store in several forms: expect the one that `stored` names belong to."""

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, TensorTarget]]:
        """The checkpoint tensors that fill this layer, by name; `prefix` is the layer's own name in the model."""
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{prefix}.{name}", TensorTarget(self, name, tuple(parameter.shape))

    def bundles(self, prefix: str) -> Iterator[tuple[str, Bundle]]:  # noqa: ARG002
        """What a trainer's model may hold in the place of `checkpoint_tensors`, by name."""
        yield from ()

    def limit_context(self, tokens: int) -> None:
        """Make tables, if this layer has any, for contexts of at most `tokens` tokens. Called before `allocate`."""

    def allocate(self, device: torch.device) -> None:
        """Give the parameters memory (uninitialised) on `device`; constant tables are computed here."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(self, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))

    def tables(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Constant tables of this layer, by attribute, for the certificate. They come from the host's math library, so
        they are part of what determines the bits, as weights are. They are the same whatever `limit_context` said."""
        yield from ()

    def prepare_weights(self) -> None:
        """Pack the filled parameters for the bound kernels and free what packing made superfluous; only once."""
        if not self.is_prepared:
            self.pack()
            self.is_prepared = True

    def pack(self) -> None:
        """Replace weights by what the bound operations' `prepare` returns. Nothing to do by default."""
