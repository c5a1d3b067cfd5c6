"""What an instruction computes, for each thread by itself."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ptx_emulator.machine import DTYPES, Array, Machine, Step
from ptx_emulator.operands import Operands, lanes, vector
from ptx_emulator.program import Instruction

BF16_NAN = 0x7FFF


def round_to_odd(product: Array, addend: Array) -> Array:
    """product + addend in binary64, the last bit set where it is not exact: to be rounded once more, correctly.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008.
    """
    product, addend = np.broadcast_arrays(product, addend)
    total = np.asarray(product + addend)
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    is_even = (total.view(np.int64) & 1) == 0
    outward = np.where((error > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(total) & (error != 0) & is_even
    return np.where(inexact, (total.view(np.int64) + outward).view(np.float64), total)


def to_bf16(wide: Array) -> Array:
    """binary32, or binary64, to the bits of bf16: to nearest even, NaN as cvt writes it."""
    wide = np.asarray(wide)
    narrow = wide.astype(np.float32)
    if wide.dtype == np.float64:
        error = wide - narrow
        outward = np.where((error > 0) == (wide > 0), 1, -1).astype(np.int32)
        is_odd = np.isfinite(narrow) & (error != 0) & ((narrow.view(np.int32) & 1) == 0)
        narrow = np.where(is_odd, (narrow.view(np.int32) + outward).view(np.float32), narrow)
    bits = narrow.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(narrow), np.uint16(BF16_NAN), rounded)


def from_bf16(bits: Array) -> Array:
    """The bits of bf16 to binary32."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def _fma(a: Array, b: Array, c: Array) -> Array:
    wide = [np.asarray(value).astype(np.float64) for value in (a, b, c)]
    return round_to_odd(wide[0] * wide[1], wide[2]).astype(np.float32)


def _fma_bf16(a: Array, b: Array, c: Array) -> Array:
    wide = [from_bf16(value).astype(np.float64) for value in (a, b, c)]
    return to_bf16(round_to_odd(wide[0] * wide[1], wide[2]))


def _pick(smaller: bool) -> Callable[[Array, Array], Array]:
    """min or max of floats: NaN loses against a number, and -0 is less than +0."""

    def pick(a: Array, b: Array) -> Array:
        first = np.where(a == b, np.signbit(a), a < b)
        chosen = np.where(first == smaller, a, b)
        return np.where(np.isnan(a), b, np.where(np.isnan(b), a, chosen))

    return pick


def _shift(left: bool) -> Callable[[Array, Array], Array]:
    """A shift by a u32 that counts at most as the number of bits."""

    def shift(a: Array, by: Array) -> Array:
        bits = a.dtype.itemsize * 8
        signed = a.dtype.kind == "i"
        count = np.minimum(by, bits - 1 if signed and not left else bits)
        moved = (a << (count % bits).astype(a.dtype)) if left else (a >> (count % bits).astype(a.dtype))
        return np.where(count == bits, a.dtype.type(0), moved)

    return shift


def _divide(a: Array, b: Array) -> Array:
    """Integers, towards zero."""
    quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def _flush(x: Array) -> Array:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def exp2(x: Array) -> Array:
    """2 ** x in binary32, correctly rounded, denormals flushed: a stand-in for the GPU's own approximation."""
    return _flush(np.exp2(_flush(x).astype(np.float64)).astype(np.float32))


_PLAIN: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul.lo": operator.mul, "mul": operator.mul,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert, "neg": operator.neg,
    "abs": np.abs, "mad.lo": lambda a, b, c: a * b + c, "rem": lambda a, b: a - _divide(a, b) * b,
}  # fmt: skip

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def _function(opcode: str) -> tuple[Callable[..., Any], list[str]] | None:
    """What `opcode` computes, and the types of its sources."""
    name, _, kind = opcode.rpartition(".")
    is_float = kind in ("f16", "f32", "f64")
    name = name.removesuffix(".rn")
    if kind == "bf16":
        found = {"fma": (_fma_bf16, 3), "mul": (lambda a, b: to_bf16(from_bf16(a) * from_bf16(b)), 2)}.get(name)
        return (found[0], ["bf16"] * found[1]) if found else None
    if is_float:
        floats: dict[str, tuple[Callable[..., Any], int]] = {
            "div": (operator.truediv, 2), "sqrt": (np.sqrt, 1), "min": (_pick(True), 2), "max": (_pick(False), 2),
            "ex2.approx.ftz": (exp2, 1),
        }  # fmt: skip
        if name == "fma" and kind == "f32":
            return _fma, ["f32"] * 3
        if name in floats:
            return floats[name][0], [kind] * floats[name][1]
    elif name in ("min", "max"):
        return (np.minimum if name == "min" else np.maximum), [kind] * 2
    elif name in ("shl", "shr"):
        return _shift(name == "shl"), [kind, "u32"]
    elif name == "div":
        return _divide, [kind] * 2
    elif name == "mul.hi":
        bits = int(kind[1:])
        wide = DTYPES[f"{kind[0]}{2 * bits}"]
        return lambda a, b: (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(DTYPES[kind]), [kind] * 2
    elif name in ("mul.wide", "mad.wide"):
        wide = DTYPES[f"{kind[0]}{2 * int(kind[1:])}"]
        if name == "mul.wide":
            return lambda a, b: np.asarray(a).astype(wide) * np.asarray(b).astype(wide), [kind] * 2
        return (
            lambda a, b, c: np.asarray(a).astype(wide) * np.asarray(b).astype(wide) + c,
            [kind, kind, f"{kind[0]}{2 * int(kind[1:])}"],
        )
    elif name == "bfe":
        return _bit_field(kind == "s32"), [kind, "u32", "u32"]
    elif opcode == "prmt.b32":
        return _permute_bytes, ["b32"] * 3
    elif name == "popc":
        return lambda a: np.bitwise_count(a).astype(np.uint32), [kind]
    if name in _PLAIN and (name.startswith("mul.lo") or name != "mul" or is_float):
        return _PLAIN[name], [kind] * {"not": 1, "neg": 1, "abs": 1, "mad.lo": 3}.get(name, 2)
    return None


def _permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Each byte of the result is one of the eight of b:a; bit 3 of its selector spreads that byte's sign instead."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(1, np.uint32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i)
        byte = both >> ((nibble & 7).astype(np.uint64) * np.uint64(8)) & np.uint64(0xFF)
        byte = np.where(nibble & 8, np.where(byte & np.uint64(0x80), 0xFF, 0), byte)
        result = result | byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def _bit_field(signed: bool) -> Callable[[Array, Array, Array], Array]:
    def extract(a: Array, position: Array, length: Array) -> Array:
        wide = a.astype(np.int64)
        mask = (np.int64(1) << length.astype(np.int64)) - 1
        field = (wide >> position.astype(np.int64)) & mask
        if signed:
            field = np.where((field >> np.maximum(length.astype(np.int64) - 1, 0)) & 1, field - mask - 1, field)
        return np.where(length == 0, 0, field).astype(np.int32 if signed else np.uint32)

    return extract


def _convert(opcode: str) -> tuple[Callable[[Any], Any], str] | None:
    """cvt.TO.FROM as a function and the type of its source."""
    match = re.fullmatch(r"cvt(?:\.(rn|rzi))?\.(\w+)\.(\w+)", opcode)
    if match is None:
        return None
    rounding, to, of = match.groups()
    if to == "bf16":
        return to_bf16, of
    if of == "bf16":
        return from_bf16, of
    if rounding == "rzi":
        bounds = np.iinfo(DTYPES[to])

        def towards_zero(x: Array) -> Array:
            inside = (x >= float(bounds.min)) & (x < -float(bounds.min))
            clamped = np.where(x > 0, bounds.max, bounds.min)
            return np.where(inside, np.where(inside, np.trunc(x), 0).astype(DTYPES[to]), clamped)

        return towards_zero, of
    return lambda x: np.asarray(x).astype(DTYPES[to]), of


def build(instruction: Instruction, operands: Operands) -> Step | None:
    """The step of an arithmetic, logical, converting or moving instruction; None for another one."""
    opcode, texts = instruction.opcode, instruction.operands
    if opcode.startswith("mov."):
        return _move(opcode.partition(".")[2], texts, operands)
    if opcode.startswith("setp."):
        return _set_predicate(opcode, texts, operands)
    if opcode.startswith("selp."):
        kind = opcode.partition(".")[2]
        write, yes, no = operands.writer(texts[0]), *(operands.source(text, kind) for text in texts[1:3])
        chooser = operands.source(texts[3], "pred")
        return lambda m: write(m, np.where(chooser(m), yes(m), no(m)))
    if match := re.fullmatch(r"cvt\.rn\.(bf16|f16)x2\.f32", opcode):
        return _pack_pair(match.group(1), texts, operands)
    if match := re.fullmatch(r"(add|sub|mul|fma)\.rn\.(bf16|f16|f32)x2", opcode):
        return _of_pairs(*match.groups(), texts, operands)
    if (converted := _convert(opcode)) is not None:
        function, kinds = converted[0], [converted[1]]
    elif (found := _function(opcode)) is not None:
        function, kinds = found
    else:
        return None
    if re.fullmatch(r"(min|max)\.f32", opcode) and len(texts) == 4:
        function, kinds = partial(_of_three, function), ["f32"] * 3
    write = operands.writer(texts[0])
    sources = [operands.source(text, kind) for text, kind in zip(texts[1:], kinds, strict=True)]
    return lambda m: write(m, function(*(np.asarray(source(m)) for source in sources)))


def _of_three(pick: Callable[[Array, Array], Array], a: Array, b: Array, c: Array) -> Array:
    return pick(pick(a, b), c)


def _move(kind: str, texts: tuple[str, ...], operands: Operands) -> Step:
    """Copies; `{a,b}` on either side packs and unpacks, the first in the low bits."""
    to, of = texts
    if to.startswith("{"):
        names = vector(to)
        part = int(kind[1:]) // len(names)
        source, writers = operands.source(of, f"b{kind[1:]}"), [operands.writer(name) for name in names]

        def unpack(m: Machine) -> None:
            value = np.asarray(source(m))
            for i, write in enumerate(writers):
                write(m, (value >> value.dtype.type(i * part)).astype(DTYPES[f"b{part}"]))

        return unpack
    write = operands.writer(to)
    if of.startswith("{"):
        names = vector(of)
        part = int(kind[1:]) // len(names)
        sources = [operands.source(name, f"b{part}") for name in names]
        whole = DTYPES[f"b{kind[1:]}"]

        def pack(m: Machine) -> None:
            parts = [np.asarray(source(m)).astype(whole) << whole.type(i * part) for i, source in enumerate(sources)]
            value = parts[0]
            for other in parts[1:]:
                value = value | other
            write(m, value)

        return pack
    source = operands.source(of, kind)
    return lambda m: write(m, source(m))


def _set_predicate(opcode: str, texts: tuple[str, ...], operands: Operands) -> Step:
    _, comparison, kind = opcode.split(".")
    write, a, b = operands.writer(texts[0]), *(operands.source(text, kind) for text in texts[1:])
    widen = from_bf16 if kind == "bf16" else np.asarray
    if comparison in ("nan", "num"):
        wanted = comparison == "nan"
        return lambda m: write(m, (np.isnan(widen(a(m))) | np.isnan(widen(b(m)))) == wanted)
    if kind[0] == "f" and len(comparison) == 3:
        compare = _COMPARISONS[comparison[:2]]
        return lambda m: write(m, compare(a(m), b(m)) | np.isnan(a(m)) | np.isnan(b(m)))
    compare = _COMPARISONS[comparison]
    if comparison == "ne" and kind[0] == "f":  # ordered: false for NaN, unlike Python's
        return lambda m: write(m, (a(m) < b(m)) | (a(m) > b(m)))
    return lambda m: write(m, compare(widen(a(m)), widen(b(m))))


def _pack_pair(kind: str, texts: tuple[str, ...], operands: Operands) -> Step:
    """The first source goes to the high half."""
    write, high, low = operands.writer(texts[0]), *(operands.source(text, "f32") for text in texts[1:])
    narrow = to_bf16 if kind == "bf16" else lambda x: np.asarray(x).astype(np.float16).view(np.uint16)
    return lambda m: write(m, (narrow(high(m)).astype(np.uint32) << np.uint32(16)) | narrow(low(m)))


def _of_pairs(name: str, kind: str, texts: tuple[str, ...], operands: Operands) -> Step:
    """The same for both halves of a register."""
    found = _function(f"{name}.rn.{kind}")
    assert found is not None
    function, kinds = found
    whole, half = f"u{2 * int(kind.lstrip('bf'))}", DTYPES[kind]
    write, sources = operands.writer(texts[0]), [operands.source(text, whole) for text in texts[1:]]
    assert len(sources) == len(kinds)

    def act(m: Machine) -> None:
        halves = (lanes(m, source(m), whole).copy().view(half) for source in sources)
        write(m, np.ascontiguousarray(function(*halves)).view(DTYPES[whole]))

    return act
