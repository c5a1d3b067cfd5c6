"""Blackwell's tensor memory and the matrix instruction that computes in it (PTX ISA, "Tensor Memory", "tcgen05").

A block has 128 lanes of 512 columns of 32 bits; an address is a lane in the high and a column in the low 16 bits. A
warp reaches the 32 lanes of its place among four. A matrix of 128 rows has one in each lane, one of 64 rows has 16 in
the lanes of each warp. Everything happens at once, and a commit arrives at its mbarrier.
"""

from __future__ import annotations

import re

import numpy as np

from ptx_emulator.copies import barrier_at
from ptx_emulator.machine import WARP, Array, Fault, Machine, Step
from ptx_emulator.matrix import UNITS, described, multiply, widen
from ptx_emulator.memory import SharedMemory
from ptx_emulator.operands import Operands, lanes, vector
from ptx_emulator.program import Instruction
from ptx_emulator.warps import whole_warps

LANES, COLUMNS = 128, 512
_NOTHING_TO_DO = ("tcgen05.dealloc", "tcgen05.relinquish", "tcgen05.wait", "tcgen05.fence")


def build(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of an instruction of tensor memory; None for another one."""
    opcode, texts = instruction.opcode, instruction.operands
    if opcode.startswith(_NOTHING_TO_DO):
        return lambda _m: None
    if opcode.startswith("tcgen05.alloc"):
        return _allocate(texts, operands)
    if match := re.fullmatch(r"tcgen05\.(ld|st)\.sync\.aligned\.(32x32b|16x32bx2)\.x\d+\.b32", opcode):
        return _move(match.group(1) == "ld", match.group(2) == "16x32bx2", texts, operands)
    if opcode == "tcgen05.mma.cta_group::1.kind::f16":
        return _multiply(texts, operands)
    if opcode.startswith("tcgen05.commit.cta_group::1.mbarrier::arrive::one"):
        return _commit(texts, operands)
    return None


def _memory(m: Machine) -> Array:
    """[blocks, lanes, columns] of 32 bits."""
    found: Array | None = m.kept.get("tensor memory")
    if found is None:
        found = m.kept["tensor memory"] = np.full((len(m.shared), LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
    return found


def _allocate(texts: tuple[str, ...], operands: Operands) -> Step:
    address, count = operands.address(texts[0]), int(texts[1], 0)

    def allocate(m: Machine) -> None:
        whole_warps(m, "tcgen05.alloc")
        used = m.kept.get("tensor columns", 0)
        if used + count > COLUMNS:
            raise Fault(f"{used + count} columns of tensor memory, there are {COLUMNS}")
        m.kept["tensor columns"] = used + count
        mask = m.mask()
        SharedMemory(m, lanes(m, address(m), "u64"), 4, mask).write(np.full(mask.sum(), used, np.uint32))

    return allocate


def _move(is_load: bool, is_halved: bool, texts: tuple[str, ...], operands: Operands) -> Step:
    """A register a column. Halved: lanes 16 to 31 of a warp have rows 0 to 15 too, `apart` columns further on."""
    *place, names = texts if not is_load else (*texts[1:], texts[0])
    address = operands.address(place[0])
    apart = int(place[1], 0) if is_halved else 0
    writers = [operands.writer(name) for name in vector(names)] if is_load else []
    sources = [] if is_load else [operands.source(name, "b32") for name in vector(names)]

    def move(m: Machine) -> None:
        whole_warps(m, "tcgen05")
        at = lanes(m, address(m), "u64").astype(np.int64)
        mask = m.mask()
        rows = 16 if is_halved else 32
        row = (at >> 16) + m.lane % rows
        reached = m.warp % (m.launch.threads // WARP) % 4 * 32
        column = (at & 0xFFFF) + m.lane // rows * apart
        if ((row < reached) | (row >= reached + 32))[mask].any():
            raise Fault("a warp reaches for lanes of tensor memory that are another one's")
        memory = _memory(m)
        for i, write in enumerate(writers):
            write(m, memory[m.block, row, column + i])
        for i, source in enumerate(sources):
            memory[m.block[mask], row[mask], (column + i)[mask]] = lanes(m, source(m), "b32")[mask]

    return move


def _rows(count: int) -> Array:
    """The lane of each row of a matrix of `count` rows that begins in lane 0; one of 64 may begin in lane 16."""
    row = np.arange(count)
    return row if count == LANES else row // 16 * 32 + row % 16


def _multiply(texts: tuple[str, ...], operands: Operands) -> Step:
    """D [M, N] in tensor memory = A [M, 16] B [N, 16] transposed (+ D); A there too or described, B described."""
    target = operands.address(texts[0])
    in_memory = texts[1].startswith("[")
    a_source = operands.address(texts[1]) if in_memory else operands.source(texts[1], "u64")
    sources = operands.source(texts[2], "u64"), operands.source(texts[3], "u32"), operands.source(texts[4], "pred")

    def compute(m: Machine) -> None:
        for thread in np.flatnonzero(m.mask()):
            block = int(m.block[thread])
            at, a_word, b_word, form, keep = (
                int(lanes(m, f(m), kind)[thread])
                for f, kind in zip((target, a_source, *sources), ("u64", "u64", "u64", "u32", "pred"), strict=True)
            )
            kind, rows, columns = _shape(form)
            memory, row = _memory(m)[block], (at >> 16) + _rows(rows)
            here = slice(at & 0xFFFF, (at & 0xFFFF) + columns)
            if in_memory:
                first = a_word & 0xFFFF
                words = memory[(a_word >> 16) + _rows(rows), first : first + 8]
                a = widen(np.ascontiguousarray(words).view(np.uint16), kind)
            else:
                a = described(m, block, a_word, rows, bool(form >> 15 & 1), kind)
            b = described(m, block, b_word, columns, bool(form >> 16 & 1), kind)
            c = memory[row, here].view(np.float32) if keep else np.zeros((rows, columns), np.float32)
            memory[row, here] = multiply(UNITS[m.launch.arch], a, b.T, c, kind).view(np.uint32)

    return compute


def _shape(form: int) -> tuple[str, int, int]:
    """Type of A and B, M and N of an instruction descriptor. Raises Fault for what no kernel here should ask."""
    kinds = {form >> 7 & 7, form >> 10 & 7}
    if form >> 4 & 3 != 1 or len(kinds) > 1 or not kinds <= {0, 1} or form >> 13 & 3:
        raise Fault(f"an instruction descriptor with other types or signs: {form:#x}")
    rows, columns = (form >> 24 & 0x1F) << 4, (form >> 17 & 0x3F) << 3
    if rows not in (64, LANES):
        raise Fault(f"a matrix of {rows} rows")
    return ("f16", "bf16")[kinds.pop()], rows, columns


def _commit(texts: tuple[str, ...], operands: Operands) -> Step:
    address = operands.address(texts[0])

    def commit(m: Machine) -> None:
        for thread in np.flatnonzero(m.mask()):
            barrier_at(m, thread, int(lanes(m, address(m), "u64")[thread])).arrive(0)

    return commit
