"""The check at start: the variant in use against the portable one, bit for bit, on a fixed input.

Every module of operators names its kernels through `checked`, so a kernel whose instruction set does not do on this CPU
what the bit order says is refused before it has computed anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from tokenspeed.errors import PluginError
from tokenspeed.machine import read_machine
from tokenspeed_kernels_aok.cpu.library import KernelCall, Library, library

PORTABLE = "portable"

Check = Callable[[KernelCall], tuple[torch.Tensor, ...]]
"""Runs a kernel over a fixed input and returns all of its outputs."""


def checked(name: str, block: struct.Struct, check: Check) -> KernelCall:
    """The kernel `name` of the variant in use, after `check` gave the same bits with it and with the portable one.

    Raises PluginError, naming kernel, variant and CPU, when the bits differ.
    """
    lib = library()
    call = lib.kernel(name, block)
    verify(lib, name, check, call, lib.kernel(name, block, PORTABLE))
    return call


def verify(lib: Library, name: str, check: Check, call: KernelCall, portable: KernelCall) -> None:
    """Raise PluginError unless `check` gives the same bits with both kernels."""
    for got, expected in zip(check(call), check(portable), strict=True):
        if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
            cpu = read_machine().name or "this CPU"
            raise PluginError(
                f"kernel {name}: variant {lib.variant} and the portable variant give different bits on {cpu}; "
                "its results cannot be reproduced elsewhere, so it is not used"
            )


def pattern(*shape: int, dtype: torch.dtype = torch.bfloat16, salt: int = 0) -> torch.Tensor:
    """A fixed tensor of mixed signs and magnitudes, among them zeros of both signs and denormals."""
    count = 1
    for size in shape:
        count *= size
    mixed = (torch.arange(salt, salt + count, dtype=torch.int64) + 1) * 2654435761 % 2**32
    sign, fraction = mixed >> 31 & 1, mixed >> 8 & 0x7FFFFF
    exponent = 119 + (mixed >> 3) % 14
    exponent[::97] = 0  # a denormal, which reads as zero
    fraction[::194] = 0
    words = (sign << 31 | exponent << 23 | fraction) & ~0xFFFF
    if dtype == torch.float32:
        words |= mixed & 0xFFFF
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return signed.view(torch.float32).to(dtype).view(shape)
