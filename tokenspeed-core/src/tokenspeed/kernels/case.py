"""One measured call of an operator beside the same work in plain torch, and how to state one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.kernels.spec import Need

Call = Callable[[int], object]
"""One measured call; the argument counts calls, so that a case can rotate over cold weights."""

COLD_BYTES = 192 << 20
"""Weights that a projection rotates over: several times any last-level cache of a few cores."""

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 1024, 3072, 16, 8, 128


@dataclass(frozen=True)
class Kernel:
    """A kernel as bound: how it runs and how it packs weights."""

    run: Callable[..., Any]
    prepare: Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    `kernel` makes the measured call for a bound kernel, `yardstick` is the same in torch. `read_bytes` and `flops`
    count the work of one call; `memory` are the tensors that a call must read from memory, for the read rate, or none.
    """

    need: Need
    shape: str
    kernel: Callable[[Kernel], Call]
    yardstick: Call
    read_bytes: int
    flops: int = 0
    memory: Sequence[torch.Tensor] = ()


def need(operator: str, dtype: torch.dtype, *roles: str, **facts: int) -> Need:
    return Need.of(operator, dtypes=dict.fromkeys(roles, str(dtype).removeprefix("torch.")), facts=facts)


def running(*arguments: Any) -> Callable[[Kernel], Call]:
    """A case's `kernel`: every call runs it on `arguments`."""
    return lambda kernel: calling(kernel.run, *arguments)


def calling(function: Callable[..., object], *arguments: Any) -> Call:
    return lambda _: function(*arguments)
