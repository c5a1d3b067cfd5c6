"""Global and shared memory, with every address checked, and the copies that a GPU makes on the side.

`cp.async` copies when its group is awaited, as late as the kernel allows; a bulk copy of a tensor map copies at once
and completes its barrier.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_emulator.machine import DTYPES, Array, Fault, Machine, Step
from ptx_emulator.operands import PARAM_STRIDE, Operands, lanes, vector
from ptx_emulator.program import Instruction


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map says of a matrix: bytes of the element, the box that one copy brings, sizes and row stride.

    `swizzle` is 0 for none, 1, 2, 3 for patterns of 32, 64 and 128 bytes.
    """

    address: int
    element_bytes: int
    box: tuple[int, int]
    shape: tuple[int, int]
    row_bytes: int
    swizzle: int


class GlobalMemory:
    """The memory of the tensors of a launch, given as (address, bytes); all else is nobody's."""

    def __init__(self, allocations: Sequence[tuple[int, int]]) -> None:
        found = sorted({allocation for allocation in allocations if allocation[1]})
        self._starts = np.array([start for start, _ in found], np.uint64)
        self._ends = np.array([start + size for start, size in found], np.uint64)
        self._bytes = [np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8) for start, size in found]

    def locate(self, addresses: Array, size: int) -> list[tuple[Array, Array, Array]]:
        """For each allocation that `addresses` meet: which of them, its memory, and the offsets in units of `size`.

        Raises Fault for an address that is outside every allocation, or no multiple of `size`.
        """
        number = np.searchsorted(self._starts, addresses, "right") - 1
        bad = number < 0
        bad |= addresses + np.uint64(size) > self._ends[np.maximum(number, 0)] if len(self._ends) else True
        if bad.any():
            raise Fault(f"{int(bad.sum())} threads touch memory that is no tensor's, as at {int(addresses[bad][0]):#x}")
        if (addresses % np.uint64(size)).any():
            raise Fault(f"an access of {size} bytes at an address that is no multiple of that")
        result = []
        for one in np.unique(number):
            which = np.flatnonzero(number == one)
            memory = self._bytes[one]
            usable = len(memory) // size * size
            offsets = (addresses[which] - self._starts[one]).astype(np.int64)
            result.append((which, memory[:usable].view(f"u{size}") if size <= 8 else memory, offsets // size))
        return result

    def read(self, addresses: Array, size: int) -> Array:
        """Unsigned integers of `size` bytes."""
        out = np.empty(len(addresses), f"u{size}")
        for which, memory, offsets in self.locate(addresses, size):
            out[which] = memory[offsets]
        return out

    def write(self, addresses: Array, values: Array) -> None:
        """Unsigned integers; threads that write one address must agree, as nothing says who is last."""
        for which, memory, offsets in self.locate(addresses, values.dtype.itemsize):
            memory[offsets] = values[which]
            if (memory[offsets] != values[which]).any():
                raise Fault("threads write different values to one address at the same time")


_SEVERAL = -2


class Races:
    """Who touched each 16 bits of shared memory since the last barrier of its block: two warps may only both read."""

    def __init__(self, cells: int) -> None:
        self._written_in, self._read_in = np.full(cells, -1, np.int64), np.full(cells, -1, np.int64)
        self._writer, self._reader = np.full(cells, -1, np.int64), np.full(cells, -1, np.int64)

    def read(self, cells: Array, phase: Array, warp: Array | int) -> None:
        """`warp` -1 stands for a group of warps, each of which reads everything."""
        if ((self._written_in[cells] == phase) & (self._writer[cells] != warp)).any():
            raise Fault("a warp reads shared memory that another one wrote since the last barrier")
        again = (self._read_in[cells] == phase) & (self._reader[cells] != warp)
        self._read_in[cells] = phase
        self._reader[cells] = warp
        several = again | (self._reader[cells] != warp)
        self._reader[cells[several]] = _SEVERAL

    def write(self, cells: Array, phase: Array, warp: Array) -> None:
        """Several warps may write the same: whether it is the same is the caller's to see."""
        if ((self._read_in[cells] == phase) & (self._reader[cells] != warp)).any():
            raise Fault("a warp writes shared memory that another one read since the last barrier")
        self._written_in[cells], self._writer[cells] = phase, warp


def races(m: Machine) -> Races:
    """The machine's records of shared memory."""
    found = m.asynchronous.get("races")
    if found is None:
        found = m.asynchronous["races"] = Races(m.shared.size // 2)
    return found


class SharedMemory:
    """Units of `size` bytes of shared memory, at the `addresses` of the threads in `mask`."""

    def __init__(self, m: Machine, addresses: Array, size: int, mask: Array) -> None:
        limit = m.launch.shared_bytes
        used = addresses[mask]
        if (used + np.uint64(size) > np.uint64(limit)).any() or (used % np.uint64(size)).any():
            raise Fault(f"an access of {size} bytes outside the {limit} bytes of shared memory, or misaligned")
        self._memory = m.shared.reshape(-1).view(f"u{size}")
        self._index = (m.block[mask] * limit + used.astype(np.int64)) // size
        cells = max(size // 2, 1)
        self._cells = (self._index * size // 2)[:, None] + np.arange(cells)
        self._who = m.phase[m.block[mask]][:, None], m.warp[mask][:, None]
        self._races = races(m)

    def read(self) -> Array:
        """What the threads find."""
        self._races.read(self._cells, *self._who)
        return self._memory[self._index]

    def write(self, values: Array) -> None:
        """Raises Fault when threads write different values to one address."""
        self._races.write(self._cells, *self._who)
        self._memory[self._index] = values
        if (self._memory[self._index] != values).any():
            raise Fault("threads write different values to one address of shared memory at the same time")


def build(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of an instruction that reads or writes memory, or waits for it; None for another one."""
    opcode, texts = instruction.opcode, instruction.operands
    if opcode.startswith("ld.param."):
        return _load_param(opcode, texts, operands)
    if match := re.fullmatch(r"(ld|st)\.(global|shared)(?:::cta)?(?:\.v(\d))?\.(\w+)", opcode):
        name, space, _, kind = match.groups()
        if name == "ld":
            return _load(space, vector(texts[0]), kind, texts[1], operands)
        return _store(space, vector(texts[1]), kind, texts[0], operands)
    if re.match(r"cp\.async\.bulk\.tensor\.2d\.shared::(cta|cluster)\.global\.mbarrier", opcode):
        return _tensor_copy(texts, operands)
    if opcode.startswith("cp.async"):
        return _asynchronous_copy(opcode, texts, operands)
    if opcode.startswith("mbarrier."):
        return _barrier(opcode, texts, operands)
    if opcode.startswith("cvta.param"):
        write, source = operands.writer(texts[0]), operands.source(texts[1], "u64")
        return lambda m: write(m, source(m))
    if opcode.startswith("fence.proxy"):
        return lambda _m: None
    return None


def _load_param(opcode: str, texts: tuple[str, ...], operands: Operands) -> Step:
    kind = opcode.rpartition(".")[2]
    write, address = operands.writer(texts[0]), operands.address(texts[1])

    def load(m: Machine) -> None:
        number = int(address(m)) // PARAM_STRIDE - 1
        write(m, np.asarray(m.launch.params[number]).view(DTYPES[kind]))

    return load


def _load(space: str, names: list[str], kind: str, address_text: str, operands: Operands) -> Step:
    writers, address = [operands.writer(name) for name in names], operands.address(address_text)
    size = DTYPES[kind].itemsize

    def load(m: Machine) -> None:
        at = lanes(m, address(m), "u64")
        mask = m.mask()
        if (at[mask] % np.uint64(size * len(writers))).any():
            raise Fault(f"a vector of {len(writers)} times {size} bytes is misaligned")
        for i, write in enumerate(writers):
            where = at + np.uint64(i * size)
            value = np.zeros(m.count, f"u{size}")
            if space == "global":
                value[mask] = m.launch.memory.read(where[mask], size)
            else:
                value[mask] = SharedMemory(m, where, size, mask).read()
            write(m, value.view(DTYPES[kind]))

    return load


def _store(space: str, names: list[str], kind: str, address_text: str, operands: Operands) -> Step:
    sources, address = [operands.source(name, kind) for name in names], operands.address(address_text)
    size = DTYPES[kind].itemsize

    def store(m: Machine) -> None:
        at = lanes(m, address(m), "u64")
        mask = m.mask()
        if (at[mask] % np.uint64(size * len(sources))).any():
            raise Fault(f"a vector of {len(sources)} times {size} bytes is misaligned")
        for i, source in enumerate(sources):
            where = at + np.uint64(i * size)
            value = lanes(m, source(m), kind).view(f"u{size}")[mask]
            if space == "global":
                m.launch.memory.write(where[mask], value)
            else:
                SharedMemory(m, where, size, mask).write(value)

    return store


def _asynchronous_copy(opcode: str, texts: tuple[str, ...], operands: Operands) -> Step:
    """cp.async: `size` bytes, of which the first so many are read and the others become zero."""
    if opcode == "cp.async.commit_group":

        def commit(m: Machine) -> None:
            m.asynchronous.setdefault("groups", []).append(m.asynchronous.pop("copies", []))

        return commit
    if opcode == "cp.async.wait_group":
        left = int(texts[0], 0)

        def wait(m: Machine) -> None:
            groups = m.asynchronous.setdefault("groups", [])
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
        m.asynchronous.setdefault("copies", []).append(copy)

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
        barrier: Barrier = m.asynchronous["mbarrier", int(m.block[thread]), address]
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
                m.asynchronous[key] = Barrier(int(argument[thread]))
            elif action == "inval":
                del m.asynchronous[key]
            elif action == "arrive":
                barrier_at(m, thread, key[2]).arrive(int(argument[thread]))
            else:
                done[thread] = barrier_at(m, thread, key[2]).phase != argument[thread] & 1
        if write is not None:
            write(m, done)

    return act
