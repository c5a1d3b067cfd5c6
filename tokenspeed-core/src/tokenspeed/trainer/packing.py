"""Weights packed for a kernel, kept until the parameter may have changed.

Two counters tell. torch counts every in-place change of a tensor, but not those of fused optimisers, nor what is
written through `.data`; so the steps of all optimisers are counted too, through torch's own hook for that. Between two
steps nothing is packed twice. Who writes through `.data` and steps no optimiser must say so: `forget_packed_weights`.
Who forgets it, as whatever merges an adapter, is found out on a CPU by a sample of the values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from tokenspeed.trainer.kernels import LoadedKernel

_SAMPLES = 8
"""Steps along an axis in which a sample is taken."""


@dataclass
class _Steps:
    """How often any optimiser of this process has stepped."""

    count: int = 0

    def add(self, *_: Any) -> None:
        self.count += 1


_packed: Any = WeakTensorKeyDictionary()
"""Parameter -> (its state, the packed weight); an entry dies with its parameter."""


@functools.cache
def _steps() -> _Steps:
    """The count, from the first packing on."""
    steps = _Steps()
    register_optimizer_step_post_hook(steps.add)
    return steps


def packed_weight(kernel: LoadedKernel, weight: torch.Tensor, count: int | None = None) -> Any:
    """`weight` as `kernel` wants it; the first `count` of its rows where there are more."""
    used = weight.detach()[:count]
    if kernel.prepare is None:
        return used
    identity = kernel.spec.name, weight._version, weight.data_ptr(), used.shape, weight.dtype
    state = (*identity, _steps().count, _sample(used))
    entry = _packed.get(weight)
    if entry is None or entry[0] != state:
        entry = (state, kernel.prepare(used))
        _packed[weight] = entry
    return entry[1]


def _sample(weight: torch.Tensor) -> bytes:
    """Some values in even steps along every axis; none from a GPU, which would have to be waited for."""
    if weight.device.type != "cpu":
        return b""
    few = weight[tuple(slice(None, None, max(1, size // _SAMPLES)) for size in weight.shape)]
    return few.contiguous().view(torch.uint8).numpy().tobytes()


def forget_packed_weights(model: torch.nn.Module) -> None:
    """Pack the model's weights anew at its next forward.

    Call it after writing through `parameter.data`, or to the shards of `fully_shard` without a step of an optimiser.
    """
    for parameter in model.parameters():
        _packed.pop(parameter, None)
    _steps().add()  # what is computed with may be other tensors, which were gathered from the parameters
