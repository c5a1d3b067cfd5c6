"""What an operand of an instruction stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_emulator.machine import DTYPES, Array, Machine, Source
from ptx_emulator.program import Program

PARAM_STRIDE = 4096
"""Addresses of parameters lie so far apart; the first is at this address."""


@dataclass(frozen=True)
class Operands:
    """Reads the operands of one program's instructions."""

    program: Program

    def source(self, text: str, kind: str) -> Source:
        """The operand as an array (or a scalar) of PTX type `kind`."""
        dtype = DTYPES[kind]
        if (of := self.program.class_of(text)) is not None:
            return _register(text, of, dtype)
        if text.startswith("%"):
            return lambda m: m.special[text]
        value = self._constant(text, dtype)
        return lambda _: value

    def address(self, text: str) -> Source:
        """`[%rd1+16]` or `[symbol+16]` as 64-bit addresses."""
        base, _, offset = text.strip("[]").partition("+")
        distance = np.uint64(int(offset or "0", 0) % 2**64)
        if (of := self.program.class_of(base)) is None:
            value = np.uint64(self._constant(base, DTYPES["u64"])) + distance
            return lambda _: value
        read = _register(base, of, DTYPES[of])
        with np.errstate(over="ignore"):
            return lambda m: read(m).astype(np.uint64) + distance

    def writer(self, name: str) -> Any:
        """A function that writes the register `name` of a machine."""
        if name == "_":
            return lambda _machine, _value: None
        of = self.program.class_of(name)
        if of is None:
            raise ValueError(f"{name} is no register")
        return lambda m, value: m.put(name, of, value)

    def _constant(self, text: str, dtype: np.dtype[Any]) -> Any:
        if match := re.fullmatch(r"(0[fd])([0-9A-Fa-f]+)", text):
            # In an instruction without a floating-point type the bits are meant.
            return np.array(int(match.group(2), 16), f"u{dtype.itemsize}").view(dtype)[()]
        if match := re.fullmatch(r"\w+_param_(\d+)", text):
            return dtype.type((int(match.group(1)) + 1) * PARAM_STRIDE)
        if text == "global_smem":
            return dtype.type(0)
        number = int(text.rstrip("U"), 0)
        if dtype == np.bool_:
            return np.bool_(number)
        if dtype.kind == "f":
            raise ValueError(f"{text} is no floating-point number")
        return np.array(number % 2 ** (8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)[()]


def _register(name: str, of: str, dtype: np.dtype[Any]) -> Source:
    held = DTYPES[of]
    if held == dtype:
        return lambda m: m.get(name, of)
    if held.itemsize == dtype.itemsize:
        return lambda m: m.get(name, of).view(dtype)
    if held.itemsize > dtype.itemsize:
        return lambda m: m.get(name, of).astype(f"u{dtype.itemsize}").view(dtype)
    raise ValueError(f"{name} is narrower than {dtype}")


def vector(text: str) -> list[str]:
    """`{a,b}` or `a` as names."""
    return text.strip("{}").split(",")


def lanes(m: Machine, value: Any, kind: str) -> Array:
    """`value` for every thread."""
    return np.broadcast_to(np.asarray(value, DTYPES[kind]), (m.count,))
