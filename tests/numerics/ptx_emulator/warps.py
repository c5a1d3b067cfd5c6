"""What the threads of a warp tell each other."""

from __future__ import annotations

import numpy as np

from ptx_emulator.machine import DTYPES, WARP, Fault, Machine, Step
from ptx_emulator.operands import Operands, lanes
from ptx_emulator.program import Instruction


def build(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of an instruction of a whole warp; None for another one."""
    opcode, texts = instruction.opcode, instruction.operands
    if opcode == "bar.warp.sync":
        return lambda m: whole_warps(m, opcode)
    if opcode.startswith(("shfl.sync", "redux.sync", "elect.sync")):
        return _across_lanes(opcode, texts, operands)
    return None


def whole_warps(m: Machine, opcode: str) -> None:
    """Raise Fault unless every warp takes part with all of its lanes or with none."""
    mask = m.mask().reshape(-1, WARP)
    if (mask.any(axis=1) != mask.all(axis=1)).any():
        raise Fault(f"{opcode} while lanes of a warp have parted")


def _across_lanes(opcode: str, texts: tuple[str, ...], operands: Operands) -> Step:
    members = operands.source(texts[-1], "u32")

    def check(m: Machine) -> None:
        whole_warps(m, opcode)
        if (lanes(m, members(m), "u32")[m.mask()] != 0xFFFFFFFF).any():
            raise Fault(f"{opcode} with some lanes only")

    if opcode.startswith("elect"):
        leader, predicate = map(operands.writer, texts[0].split("|"))

        def elect(m: Machine) -> None:
            check(m)
            leader(m, np.zeros(m.count, np.uint32))
            predicate(m, m.lane == 0)

        return elect
    kind = opcode.rpartition(".")[2]
    value = operands.source(texts[1], kind)
    if opcode.startswith("redux"):
        write = operands.writer(texts[0])
        reduce = {"add": np.add, "min": np.fmin, "max": np.fmax}[opcode.split(".")[2]].reduce

        def redux(m: Machine) -> None:
            check(m)
            folded = reduce(lanes(m, value(m), kind).reshape(-1, WARP), axis=1, dtype=DTYPES[kind])
            write(m, np.repeat(folded, WARP))

        return redux
    write, _, found = texts[0].partition("|")
    writers = operands.writer(write), operands.writer(found or "_")
    by, clamp = (operands.source(text, "u32") for text in texts[2:4])
    mode = opcode.split(".")[2]

    def shuffle(m: Machine) -> None:
        check(m)
        b, c = lanes(m, by(m), "u32").astype(np.int64) & 31, lanes(m, clamp(m), "u32").astype(np.int64)
        segment, last = c >> 8 & 31, c & 31
        lowest = m.lane & segment
        limit = lowest | last & ~segment
        from_lane = {"up": m.lane - b, "down": m.lane + b, "bfly": m.lane ^ b, "idx": lowest | b & ~segment}[mode]
        inside = from_lane >= limit if mode == "up" else from_lane <= limit
        index = m.warp * WARP + np.where(inside, from_lane, m.lane)
        writers[0](m, lanes(m, value(m), "b32")[index])
        writers[1](m, inside)

    return shuffle
