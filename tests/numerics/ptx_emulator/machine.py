"""Threads in lockstep: registers, divergence, barriers. What an instruction does is elsewhere.

All threads of several blocks of the grid advance together, one instruction at a time; a register is an array over them.
Where threads part, those that are furthest behind go first, basic block by basic block, so that they meet again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WARP = 32

Array = NDArray[Any]
Step = Callable[["Machine"], None]
Source = Callable[["Machine"], Any]

DTYPES: dict[str, np.dtype[Any]] = {
    **{f"b{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{f"u{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{"f16": np.dtype("f2"), "bf16": np.dtype("u2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")},
    "pred": np.dtype("?"),
}
"""NumPy's type for each type of PTX; bf16 is its bits. Registers hold `pred` and the unsigned ones."""

_ENDED = np.iinfo(np.int64).max
_WAITING = _ENDED - 1


class Fault(Exception):
    """The kernel did what a GPU would not survive, or what nobody should rely on."""


@dataclass(frozen=True)
class Launch:
    """A grid of blocks of `threads` threads with `shared_bytes` of shared memory.

    `arch` is the GPU's (80 for sm80), `params` the parameters as unsigned scalars or tensor maps, `memory` the global
    memory that they may touch.
    """

    arch: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    params: tuple[Any, ...]
    memory: Any


@dataclass(frozen=True)
class Block:
    """A basic block: what its threads do, and where they go. `target` is a block, or -1 where they end."""

    steps: tuple[Step, ...]
    target: int | None = None
    condition: Source | None = None
    is_barrier: bool = False


class Machine:
    """The threads of the blocks `numbers` (flat, into the grid) of one launch.

    `active` is the mask of the threads that execute the present instruction, or None for all of them. `shared` has a
    row for each block, and `phase` counts its barriers. `kept` is what other modules keep, as copies on their way.
    """

    def __init__(self, launch: Launch, numbers: Sequence[int]) -> None:
        self.launch = launch
        self.count = len(numbers) * launch.threads
        thread = np.arange(self.count)
        self.block = thread // launch.threads
        self.warp = thread // WARP
        self.lane = thread % WARP
        self.active: Array | None = None
        self.shared = np.full((len(numbers), launch.shared_bytes), 0xFF, np.uint8)  # NaN, as anything may be left there
        self.phase = np.zeros(len(numbers), np.int64)
        self.kept: dict[Any, Any] = {}
        self._registers: dict[str, Array] = {}
        flat = np.asarray(numbers)[self.block]
        width, height, _ = launch.grid
        where = (flat % width, flat // width % height, flat // width // height)
        self.special = {f"%ctaid.{axis}": value.astype(np.uint32) for axis, value in zip("xyz", where, strict=True)}
        self.special |= {f"%nctaid.{axis}": np.uint32(size) for axis, size in zip("xyz", launch.grid, strict=True)}
        self.special["%tid.x"] = (thread % launch.threads).astype(np.uint32)

    def mask(self) -> Array:
        """The threads that execute the present instruction."""
        return np.ones(self.count, np.bool_) if self.active is None else self.active

    def get(self, name: str, kind: str) -> Array:
        """A register of class `kind`; one that was never written holds zeros."""
        value = self._registers.get(name)
        return np.zeros(self.count, DTYPES[kind]) if value is None else value

    def put(self, name: str, kind: str, value: Any) -> None:
        """Write a register of class `kind` for the active threads. A signed value is extended by its sign."""
        value = np.asarray(value)
        dtype = DTYPES[kind]
        if value.dtype != dtype:
            is_same_size = value.dtype.itemsize == dtype.itemsize and np.dtype("?") not in (dtype, value.dtype)
            value = value.view(dtype) if is_same_size else value.astype(dtype)
        if self.active is not None:
            value = np.where(self.active, value, self.get(name, kind))
        elif value.shape != (self.count,):
            value = np.broadcast_to(value, (self.count,))
        self._registers[name] = value

    def under(self, condition: Array, step: Step) -> None:
        """Execute `step` for those of the active threads for which `condition` holds."""
        outer = self.active
        mask = condition if outer is None else outer & condition
        if mask.any():
            self.active = None if mask.all() else mask
            step(self)
            self.active = outer


def run(blocks: Sequence[Block], machine: Machine) -> None:
    """Execute until all threads have ended. Raises Fault for a barrier that some threads of a block never reach."""
    at = np.zeros(machine.count, np.int64)
    resume = np.zeros(machine.count, np.int64)
    while (lowest := int(at.min())) != _ENDED:
        if lowest == _WAITING:
            raise Fault("some threads wait at a barrier that others of their block have passed by or never reach")
        here = at == lowest
        machine.active = None if here.all() else here
        block = blocks[lowest]
        for step in block.steps:
            step(machine)
        going: Any = lowest + 1
        if block.target is not None:
            target = _ENDED if block.target < 0 else block.target
            going = target if block.condition is None else np.where(block.condition(machine), target, going)
        if block.is_barrier:
            resume[here], going = going, _WAITING
        at = np.where(here, going, at)
        if block.is_barrier:
            arrived = (at.reshape(len(machine.shared), -1) >= _WAITING).all(axis=1)
            machine.phase += arrived
            at = np.where(arrived[machine.block] & (at == _WAITING), resume, at)
