"""Copies that a GPU makes on the side, and the barriers that say when they have come.

`cp.async` copies when its group is awaited, as late as the kernel allows; a bulk copy of a tensor map copies at once
and completes its barrier.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_emulator.machine import Array, Fault, Machine, Step
from ptx_emulator.memory import SharedMemory
from ptx_emulator.operands import PARAM_STRIDE, Operands, lanes
from ptx_emulator.program import Instruction


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map says of a matrix: bytes of the element, the box that one copy brings, sizes and row stride.

    `swizzle` is 0 for none, 1, 2, 3 for patterns of 32, 64 and 128 bytes. Raises Fault for what the driver's
    `cuTensorMapEncodeTiled` refuses.
    """

    address: int
    element_bytes: int
    box: tuple[int, int]
    shape: tuple[int, int]
    row_bytes: int
    swizzle: int

    def __post_init__(self) -> None:
        width = self.box[1] * self.element_bytes
        is_aligned = not (self.address % 16 or self.row_bytes % 16 or width % 16)
        if not is_aligned or max(self.box) > 256 or min(*self.box, *self.shape) < 1 or self.row_bytes >= 1 << 40:
            raise Fault(f"the driver refuses such a tensor map: {self}")
        if self.swizzle and width > 16 << self.swizzle:
            raise Fault(f"a box of {width} bytes is wider than its swizzle: {self}")


def build(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of an instruction that copies on the side, waits for a copy or orders them; None for another one."""
    opcode, texts = instruction.opcode, instruction.operands
    if re.match(r"cp\.async\.bulk\.tensor\.2d\.shared::(cta|cluster)\.global\.mbarrier", opcode):
        return _tensor_copy(texts, operands)
    if opcode.startswith("cp.async"):
        return _asynchronous_copy(opcode, texts, operands)
    if opcode.startswith("mbarrier."):
        return _barrier(opcode, texts, operands)
    if opcode.startswith("fence.proxy"):
        return lambda _m: None
    return None


def _asynchronous_copy(opcode: str, texts: tuple[str, ...], operands: Operands) -> Step:
    """cp.async: `size` bytes, of which the first so many are read and the others become zero."""
    if opcode == "cp.async.commit_group":

        def commit(m: Machine) -> None:
            m.kept.setdefault("groups", []).append(m.kept.pop("copies", []))

        return commit
    if opcode == "cp.async.wait_group":
        left = int(texts[0], 0)

        def wait(m: Machine) -> None:
            groups = m.kept.setdefault("groups", [])
            while len(groups) > left:
                for copy in groups.pop(0):
                    copy()

        return wait
    to, of, size = operands.address(texts[0]), operands.address(texts[1]), int(texts[2], 0)
    given = operands.source(texts[3], "u32") if len(texts) > 3 else lambda _m: np.uint32(size)

    def issue(m: Machine) -> None:
        mask = m.mask()
        target, source, count = (lanes(m, f(m), k) for f, k in ((to, "u64"), (of, "u64"), (given, "u32")))

        def copy() -> None:
            for word in range(size // 4):
                wanted = mask & (count > 4 * word)
                value = np.zeros(m.count, np.uint32)
                value[wanted] = m.launch.memory.read(source[wanted] + np.uint64(4 * word), 4)
                SharedMemory(m, target + np.uint64(4 * word), 4, mask).write(value[mask])

        if set(np.unique(count[mask])) - {0, size}:
            raise Fault("cp.async of a part")
        m.kept.setdefault("copies", []).append(copy)

    return issue


def swizzled(offset: Array, swizzle: int) -> Array:
    """Where a byte at `offset` of a box lies: 16-byte units are exchanged by the bits of the row of 128 bytes."""
    bits = (1 << swizzle) - 1
    return offset ^ (((offset >> 7) & bits) << 4)


def _tensor_copy(texts: tuple[str, ...], operands: Operands) -> Step:
    """A box of a matrix to shared memory; what lies outside of the matrix is zero, and counts."""
    to = operands.address(texts[0])
    match = re.fullmatch(r"\[(%\w+),\{(.+)\}\]", texts[1])
    assert match is not None
    map_address = operands.source(match.group(1), "u64")
    column, row = (operands.source(text, "s32") for text in match.group(2).split(","))
    barrier = operands.address(texts[2])

    def copy(m: Machine) -> None:
        for thread in np.flatnonzero(m.mask()):
            values = [int(lanes(m, f(m), k)[thread]) for f, k in ((map_address, "u64"), (column, "s32"), (row, "s32"))]
            tensor: TensorMap = m.launch.params[values[0] // PARAM_STRIDE - 1]
            at = int(lanes(m, to(m), "u64")[thread])
            rows, columns = (np.arange(n) for n in tensor.box)
            inside = (values[2] + rows < tensor.shape[0])[:, None] & (values[1] + columns < tensor.shape[1])[None, :]
            inside &= (values[2] + rows >= 0)[:, None] & (values[1] + columns >= 0)[None, :]
            size = tensor.element_bytes
            addresses = tensor.address + (values[2] + rows)[:, None] * tensor.row_bytes + (values[1] + columns) * size
            box = np.zeros(tensor.box, f"u{size}")
            box[inside] = m.launch.memory.read(addresses[inside].astype(np.uint64), size)
            offsets = np.arange(box.size * size).reshape(-1, size)[:, 0]
            shared = m.shared[m.block[thread]]
            if at + box.size * size > len(shared) or at % 128:
                raise Fault("a tensor copy outside of shared memory, or misaligned")
            shared[at + swizzled(offsets, tensor.swizzle)[:, None] + np.arange(size)] = box.reshape(-1, 1).view(
                np.uint8
            )
            barrier_at(m, thread, int(lanes(m, barrier(m), "u64")[thread])).complete(box.size * size)

    return copy


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and all announced bytes have come."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = 0
        self.phase = 0

    def arrive(self, expected: int) -> None:
        self.missing -= 1
        self.bytes += expected
        self._settle()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self._settle()

    def _settle(self) -> None:
        if self.missing < 0:
            raise Fault("more arrivals at an mbarrier than it was made for")
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.count, self.phase ^ 1


def barrier_at(m: Machine, thread: int, address: int) -> Barrier:
    """The mbarrier at an address of shared memory of a thread's block."""
    try:
        barrier: Barrier = m.kept["mbarrier", int(m.block[thread]), address]
    except KeyError:
        raise Fault(f"an mbarrier at {address} that was not initialised") from None
    return barrier


def _barrier(opcode: str, texts: tuple[str, ...], operands: Operands) -> Step:
    action = opcode.split(".")[1]
    address = operands.address(next(text for text in texts if text.startswith("[")))
    number: Any = operands.source(texts[-1], "u32") if not texts[-1].startswith("[") else lambda _m: np.uint32(0)
    write = operands.writer(texts[0]) if action == "try_wait" else None

    def act(m: Machine) -> None:
        at, argument = lanes(m, address(m), "u64"), lanes(m, number(m), "u32")
        done = np.zeros(m.count, np.bool_)
        for thread in np.flatnonzero(m.mask()):
            key = "mbarrier", int(m.block[thread]), int(at[thread])
            if action == "init":
                m.kept[key] = Barrier(int(argument[thread]))
            elif action == "inval":
                del m.kept[key]
            elif action == "arrive":
                barrier_at(m, thread, key[2]).arrive(int(argument[thread]))
            else:
                done[thread] = barrier_at(m, thread, key[2]).phase != argument[thread] & 1
        if write is not None:
            write(m, done)

    return act
