"""Parameters, global memory and shared memory: every address is checked, and who shares what between barriers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import numpy as np

from ptx_emulator.machine import DTYPES, Array, Fault, Machine, Step
from ptx_emulator.operands import PARAM_STRIDE, Operands, lanes, vector
from ptx_emulator.program import Instruction


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
            result.append((which, memory[:usable].view(f"u{size}"), offsets // size))
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
    found = m.kept.get("races")
    if found is None:
        found = m.kept["races"] = Races(m.shared.size // 2)
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
    """The step of an instruction that loads or stores; None for another one."""
    opcode, texts = instruction.opcode, instruction.operands
    if opcode.startswith("ld.param."):
        return _load_param(opcode, texts, operands)
    if match := re.fullmatch(r"(ld|st)\.(global|shared)(?:::cta)?(?:\.v(\d))?\.(\w+)", opcode):
        name, space, _, kind = match.groups()
        if name == "ld":
            return _load(space, vector(texts[0]), kind, texts[1], operands)
        return _store(space, vector(texts[1]), kind, texts[0], operands)
    if opcode.startswith("cvta.param"):
        write, source = operands.writer(texts[0]), operands.source(texts[1], "u64")
        return lambda m: write(m, source(m))
    return None


def _load_param(opcode: str, texts: tuple[str, ...], operands: Operands) -> Step:
    kind = opcode.rpartition(".")[2]
    write, address = operands.writer(texts[0]), operands.address(texts[1])

    def load(m: Machine) -> None:
        number = int(address(m)) // PARAM_STRIDE - 1
        write(m, np.asarray(m.launch.params[number]).view(DTYPES[kind]))

    return load


def _check_vector(addresses: Array, count: int, size: int) -> None:
    if (addresses % np.uint64(count * size)).any():
        raise Fault(f"a vector of {count} times {size} bytes is misaligned")


def _load(space: str, names: list[str], kind: str, address_text: str, operands: Operands) -> Step:
    writers, address = [operands.writer(name) for name in names], operands.address(address_text)
    size = DTYPES[kind].itemsize

    def load(m: Machine) -> None:
        at = lanes(m, address(m), "u64")
        mask = m.mask()
        _check_vector(at[mask], len(writers), size)
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
        _check_vector(at[mask], len(sources), size)
        for i, source in enumerate(sources):
            where = at + np.uint64(i * size)
            value = lanes(m, source(m), kind).view(f"u{size}")[mask]
            if space == "global":
                m.launch.memory.write(where[mask], value)
            else:
                SharedMemory(m, where, size, mask).write(value)

    return store
