"""Weights packed for a kernel, kept until the parameter changes.

A parameter's version counter tells: torch counts every in-place change, so an optimiser step is noticed and nothing is
packed twice between two steps. What is written through `.data` is not counted; say so with `forget_packed_weights`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tokenspeed.trainer.kernels import LoadedKernel

_packed: Any = WeakTensorKeyDictionary()
"""Parameter -> (its state, the packed weight); an entry dies with its parameter."""


def packed_weight(kernel: LoadedKernel, weight: torch.Tensor) -> Any:
    """`weight` as `kernel` wants it."""
    if kernel.prepare is None:
        return weight.detach()
    state = (kernel.spec.name, weight._version, weight.data_ptr(), weight.shape, weight.dtype)
    entry = _packed.get(weight)
    if entry is None or entry[0] != state:
        entry = (state, kernel.prepare(weight.detach()))
        _packed[weight] = entry
    return entry[1]


def forget_packed_weights(model: torch.nn.Module) -> None:
    """Pack the model's weights anew at its next forward. Call it after writing through `parameter.data`."""
    for parameter in model.parameters():
        _packed.pop(parameter, None)
