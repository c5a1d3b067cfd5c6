"""Matrix fragments: which thread holds which element, and what the matrix unit makes of them.

The vendor publishes nothing about the inside of a matrix instruction. Others have measured it, and found a model that
has the bits of the hardware (Xie et al., "MMA-Sim", arXiv:2511.10909): of the products and the accumulator, each is cut
off a fixed number of bits below the largest exponent, the rest is added exactly, and the sum is cut off to binary32. An
element is then a function of its row, its column and its accumulator, whatever the shape of the instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ptx_emulator.arithmetic import from_bf16
from ptx_emulator.copies import swizzled
from ptx_emulator.machine import WARP, Array, Fault, Machine, Step
from ptx_emulator.memory import SharedMemory, races
from ptx_emulator.operands import Operands, lanes, vector
from ptx_emulator.program import Instruction
from ptx_emulator.warps import whole_warps

_LANE = np.arange(WARP)
_GROUP, _PAIR = _LANE // 4, 2 * (_LANE % 4)
WARP_GROUP = 4 * WARP


@dataclass(frozen=True)
class Unit:
    """A generation of matrix units: `bits` kept below the largest exponent, `depth` products of 16 bits at a time."""

    bits: int
    depth: int


UNITS = {80: Unit(24, 8), 86: Unit(24, 8), 89: Unit(24, 8), 90: Unit(25, 16), 100: Unit(25, 16)}
"""By architecture: Ampere, Ada, Hopper, Blackwell."""

INSTRUCTION_DEPTH = 16
"""Elements of K that one instruction for 16-bit operands takes."""

_LEAST_EXPONENT = {"bf16": -126, "f16": -14, "f32": -126}
_OF_ZERO = -9999


def _exponents(values: Array, kind: str) -> Array:
    """Of the leading bit; denormals have that of the smallest normal number, zeros one below all others."""
    exponents = np.maximum(np.frexp(values)[1] - 1, _LEAST_EXPONENT[kind])
    return np.where(values == 0, _OF_ZERO, exponents)


def multiply(unit: Unit, a: Array, b: Array, c: Array, kind: str) -> Array:
    """a [..., M, K] times b [..., K, N], plus c [..., M, N], of binary32 that hold values of `kind`: binary32."""
    for start in range(0, a.shape[-1], unit.depth):
        part = slice(start, start + unit.depth)
        c = _multiply_add(unit.bits, a[..., part], b[..., part, :], c, kind)
    return c


def project(arch: int, x: Array, weight: Array, kind: str, total: Array | None = None) -> Array:
    """x [M, K] times the transpose of weight [N, K], an instruction after another along K, added to `total` or to 0."""
    padding = ((0, 0), (0, -x.shape[1] % INSTRUCTION_DEPTH))
    x, weight = np.pad(x, padding), np.pad(weight, padding)
    total = np.zeros((len(x), len(weight)), np.float32) if total is None else total
    for start in range(0, x.shape[1], INSTRUCTION_DEPTH):
        part = slice(start, start + INSTRUCTION_DEPTH)
        total = multiply(UNITS[arch], x[:, part], weight[:, part].T, total, kind)
    return total


def _multiply_add(bits: int, a: Array, b: Array, c: Array, kind: str) -> Array:
    of_products = _exponents(a, kind)[..., :, :, None] + _exponents(b, kind)[..., None, :, :]
    largest = np.maximum(of_products.max(axis=-2), _exponents(c, "f32"))
    is_zero = largest <= _OF_ZERO // 2
    scale = np.ldexp(1.0, np.where(is_zero, 0, bits - largest))
    products = a.astype(np.float64)[..., :, :, None] * b.astype(np.float64)[..., None, :, :]
    units = np.trunc(products * scale[..., None, :]).sum(axis=-2) + np.trunc(c.astype(np.float64) * scale)
    exact = units / scale + 0.0  # a zero is positive
    rounded = exact.astype(np.float32)
    outward = (np.abs(rounded) > np.abs(exact)) & np.isfinite(rounded)
    cut = np.where(outward, np.nextafter(rounded, np.float32(0)), rounded)
    plain = products.sum(axis=-2) + c.astype(np.float64)
    return np.where(np.isfinite(plain), cut, plain.astype(np.float32))


def widen(bits: Array, kind: str) -> Array:
    """16 bits of `kind` to binary32."""
    return from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def build(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of a matrix instruction; None for another one."""
    opcode, texts = instruction.opcode, instruction.operands
    if match := re.fullmatch(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", opcode):
        name, count, transposed = match.group(1), int(match.group(2)), bool(match.group(3))
        registers, address = (texts if name == "ld" else texts[::-1])[:2]
        return _fragments(name == "ld", count, transposed, vector(registers), address, operands)
    if match := re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", opcode):
        return _mma(match.group(1), texts, operands)
    if match := re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", opcode):
        return _wgmma(int(match.group(1)), match.group(2), texts, operands)
    if opcode.startswith(("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")):
        return lambda _m: None
    return None


def _fragments(
    is_load: bool, count: int, transposed: bool, names: list[str], address_text: str, operands: Operands
) -> Step:
    """`count` matrices of 8 by 8; lane 8i + r gives the address of row r of matrix i, a lane holds two of each."""
    address = operands.address(address_text)
    writers = [operands.writer(name) for name in names] if is_load else []
    sources = [] if is_load else [operands.source(name, "u32") for name in names]

    def act(m: Machine) -> None:
        whole_warps(m, "ldmatrix")
        at = lanes(m, address(m), "u64")
        mask = m.mask()
        if (at[mask & (m.lane < 8 * count)] % np.uint64(16)).any():
            raise Fault("a row of a matrix is misaligned")
        for i in range(count):
            rows, columns = (_PAIR, _GROUP) if transposed else (_GROUP, _PAIR)
            pair = np.zeros(m.count, np.uint32)
            for half in (0, 1):
                row, column = (rows + half, columns) if transposed else (rows, columns + half)
                giver = m.warp * WARP + 8 * i + np.tile(row, m.count // WARP)
                where = at[giver] + (2 * np.tile(column, m.count // WARP)).astype(np.uint64)
                cells = SharedMemory(m, where, 2, mask)
                if is_load:
                    pair[mask] |= cells.read().astype(np.uint32) << np.uint32(16 * half)
                else:
                    cells.write((lanes(m, sources[i](m), "u32")[mask] >> np.uint32(16 * half)).astype("u2"))
            if is_load:
                writers[i](m, pair)

    return act


def _halves(m: Machine, sources: list[Any]) -> Array:
    """Registers as [threads, registers, 2] of 16 bits."""
    return (
        np.stack([lanes(m, source(m), "u32") for source in sources], axis=1)
        .copy()
        .view(np.uint16)
        .reshape(m.count, len(sources), 2)
    )


def _mma(kind: str, texts: tuple[str, ...], operands: Operands) -> Step:
    writers = [operands.writer(name) for name in vector(texts[0])]
    a_parts, b_parts = ([operands.source(name, "u32") for name in vector(text)] for text in texts[1:3])
    c_parts = [operands.source(name, "f32") for name in vector(texts[3])]

    def act(m: Machine) -> None:
        whole_warps(m, "mma")
        warps = m.count // WARP
        held = widen(_halves(m, a_parts), kind).reshape(warps, WARP, 4, 2)
        a, b = np.empty((warps, 16, 16), np.float32), np.empty((warps, 16, 8), np.float32)
        for register in range(4):
            for half in (0, 1):
                a[:, _GROUP + 8 * (register % 2), _PAIR + half + 8 * (register // 2)] = held[:, :, register, half]
        held = widen(_halves(m, b_parts), kind).reshape(warps, WARP, 2, 2)
        for register in range(2):
            for half in (0, 1):
                b[:, _PAIR + half + 8 * register, _GROUP] = held[:, :, register, half]
        c = _gather(m, c_parts, warps, WARP, _rows_of_warp, 16, 8)
        _scatter(m, writers, multiply(UNITS[m.launch.arch], a, b, c, kind), _rows_of_warp)

    return act


@cache
def _rows_of_warp(register: int) -> tuple[Array, Array]:
    """Row and column of accumulator `register` of each lane of a warp, in a tile of 16 rows."""
    return _GROUP + 8 * (register // 2 % 2), 8 * (register // 4) + _PAIR + register % 2


@cache
def _rows_of_group(register: int) -> tuple[Array, Array]:
    """The same for the four warps of a group, which have 16 rows each."""
    row, column = _rows_of_warp(register)
    return np.concatenate([row + 16 * warp for warp in range(4)]), np.tile(column, 4)


_Place = Callable[[int], tuple[Array, Array]]


def _gather(m: Machine, parts: list[Any], teams: int, size: int, place: _Place, rows: int, columns: int) -> Array:
    out = np.empty((teams, rows, columns), np.float32)
    for register, part in enumerate(parts):
        row, column = place(register)
        out[:, row, column] = lanes(m, part(m), "f32").reshape(teams, size)
    return out


def _scatter(m: Machine, writers: list[Any], matrix: Array, place: _Place) -> None:
    for register, write in enumerate(writers):
        row, column = place(register)
        write(m, np.ascontiguousarray(matrix[:, row, column]).reshape(-1))


def _wgmma(n: int, kind: str, texts: tuple[str, ...], operands: Operands) -> Step:
    """D [64, n] of four warps = A [64, 16] B [16, n] (+ D); A in registers or described, B described."""
    writers = [operands.writer(name) for name in vector(texts[0])]
    c_parts = [operands.source(name, "f32") for name in vector(texts[0])]
    in_registers = texts[1].startswith("{")
    a_parts = [operands.source(name, "u32") for name in vector(texts[1])] if in_registers else []
    a_descriptor = None if in_registers else operands.source(texts[1], "u64")
    b_descriptor = operands.source(texts[2], "u64")
    scale = operands.source(texts[3], "pred" if texts[3].startswith("%p") else "u32")
    immediates = [int(text) for text in texts[4:]]
    if immediates[:2] != [1, 1]:
        raise ValueError(f"wgmma with other signs than 1, 1: {texts}")
    transposes = ([0] if in_registers else []) + immediates[2:]

    def act(m: Machine) -> None:
        mask = m.mask()
        if not mask.all() or m.launch.threads % WARP_GROUP:
            raise Fault("wgmma without all threads of a group of warps")
        teams = m.count // WARP_GROUP
        if a_descriptor is None:
            held = widen(_halves(m, a_parts), kind).reshape(teams, WARP_GROUP, 4, 2)
            a = np.empty((teams, 64, 16), np.float32)
            for register in range(4):
                for half in (0, 1):
                    row = np.concatenate([_GROUP + 16 * warp for warp in range(4)]) + 8 * (register % 2)
                    column = np.tile(_PAIR, 4) + half + 8 * (register // 2)
                    a[:, row, column] = held[:, :, register, half]
        else:
            a = _described(m, a_descriptor, 64, bool(transposes[0]), kind)
        b = _described(m, b_descriptor, n, bool(transposes[1]), kind)
        keep = lanes(m, scale(m), "b32").reshape(teams, WARP_GROUP)[:, 0].astype(np.bool_)
        c = _gather(m, c_parts, teams, WARP_GROUP, _rows_of_group, 64, n)
        c = np.where(keep[:, None, None], c, np.float32(0))
        product = multiply(UNITS[m.launch.arch], a, b.swapaxes(1, 2), c, kind)
        _scatter(m, writers, product, _rows_of_group)

    return act


def _described(m: Machine, source: Any, extent: int, transposed: bool, kind: str) -> Array:
    """[teams, extent, 16] of the operand that each group of warps describes."""
    words = lanes(m, source(m), "u64").reshape(-1, WARP_GROUP)
    if (words != words[:, :1]).any():
        raise Fault("threads of a group give different matrix descriptors")
    blocks = m.block[::WARP_GROUP]
    parts = zip(blocks.tolist(), words[:, 0].tolist(), strict=True)
    return np.stack([described(m, block, word, extent, transposed, kind) for block, word in parts])


def described(m: Machine, block: int, word: int, extent: int, transposed: bool, kind: str) -> Array:
    """[extent, 16] of the operand in shared memory that a matrix descriptor describes (PTX ISA, "Matrix descriptor").

    K-major (not transposed): rows of K, `extent` of them, in atoms of 8 rows. Else K counts the rows of the atoms.
    """
    start, leading, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzle = {0: 0, 1: 3, 2: 2, 3: 1}[word >> 62]
    if word >> 49 & 7:
        raise Fault("a matrix descriptor with a base offset")
    i, k = np.arange(extent)[:, None], np.arange(16)[None, :]
    width = 16 << swizzle  # bytes of a row of an atom
    if transposed:
        byte = 2 * i
        offset = byte // width * leading + k // 8 * stride + k % 8 * width + byte % width
    elif swizzle:
        offset = i // 8 * stride + i % 8 * width + 2 * k
    else:
        offset = i // 8 * stride + 2 * k // 16 * leading + i % 8 * 16 + 2 * k % 16
    address = swizzled(start + offset, swizzle)
    shared = m.shared[block]
    if int(address.max()) + 2 > len(shared):
        raise Fault("a matrix descriptor outside of shared memory")
    races(m).read(block * len(shared) // 2 + address // 2, m.phase[block], -1)
    return widen(np.ascontiguousarray(shared.view(np.uint16)[address // 2]), kind)
