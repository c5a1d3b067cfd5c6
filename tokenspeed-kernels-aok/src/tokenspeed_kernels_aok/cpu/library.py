"""The native library: found, checked, and its kernels as Python callables.

Knows which instruction sets the library was built for, which of them this CPU has, and which one is in use. Imports
torch first, so that the library shares the OpenMP runtime (and its threads) that torch has loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch  # noqa: F401  (loads libgomp.so.1 before the library asks for it)

from tokenspeed.errors import PluginError

LIBRARY_FILE = "libtokenspeed_aok.so"

ISA_VARIABLE = "TOKENSPEED_AOK_ISA"
"""Environment variable that forces a lower instruction set, for tests; plan and certificate show it."""

KernelCall = Callable[[bytes], None]
"""Runs a kernel over one packed argument block (`csrc/abi.h`)."""


class Variant(NamedTuple):
    """One instruction set that the library was built for."""

    name: str
    supported: bool


class Library:
    """A loaded native library.

    `variants` are in rising order of preference; `variant` names the one in use. Calls release the GIL.
    """

    def __init__(self, path: Path, forced: str | None = None) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        for function, result, arguments in (
            ("aok_variant_count", ctypes.c_int64, ()),
            ("aok_variant_name", ctypes.c_char_p, (ctypes.c_int64,)),
            ("aok_variant_supported", ctypes.c_int64, (ctypes.c_int64,)),
            ("aok_kernel_count", ctypes.c_int64, ()),
            ("aok_kernel_name", ctypes.c_char_p, (ctypes.c_int64,)),
            ("aok_kernel_args_bytes", ctypes.c_int64, (ctypes.c_int64,)),
            ("aok_kernel", ctypes.c_void_p, (ctypes.c_int64, ctypes.c_int64)),
        ):
            entry = getattr(self._dll, function)
            entry.restype, entry.argtypes = result, arguments
        self.variants = tuple(
            Variant(self._dll.aok_variant_name(i).decode(), bool(self._dll.aok_variant_supported(i)))
            for i in range(self._dll.aok_variant_count())
        )
        self._kernels = {self._dll.aok_kernel_name(i).decode(): i for i in range(self._dll.aok_kernel_count())}
        self.variant = self._choose(forced)

    def supported_variants(self) -> tuple[str, ...]:
        """Names of the variants that this CPU can run, in rising order of preference."""
        return tuple(variant.name for variant in self.variants if variant.supported)

    def kernel(self, name: str, block: struct.Struct, variant: str | None = None) -> KernelCall:
        """The kernel `name` of the variant in use, or of `variant`; `block` is how the caller packs its arguments.

        Raises PluginError when the block's size is not the one that the library was compiled with, or when this CPU
        cannot run the variant.
        """
        index = self._kernels[name]
        expected = self._dll.aok_kernel_args_bytes(index)
        if block.size != expected:
            raise PluginError(
                f"{self.path}: kernel {name} takes {expected} bytes of arguments, this package packs {block.size}; "
                "library and package are of different versions, reinstall tokenspeed-kernels-aok"
            )
        chosen = variant or self.variant
        if chosen not in self.supported_variants():
            raise PluginError(f"kernel variant {chosen!r}: this CPU has {', '.join(self.supported_variants())}")
        position = next(i for i, one in enumerate(self.variants) if one.name == chosen)
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        call: KernelCall = prototype(self._dll.aok_kernel(position, index))
        return call

    def _choose(self, forced: str | None) -> str:
        supported = self.supported_variants()
        if forced is None:
            return supported[-1]
        if forced not in supported:
            raise PluginError(f"{ISA_VARIABLE}={forced!r}: this CPU and this build have {', '.join(supported)}")
        return forced


def find_library() -> Path:
    """The native library beside this module, or where an editable install put it.

    Raises PluginError when the distribution was installed without its native part.
    """
    package = importlib.import_module(__package__ or "tokenspeed_kernels_aok.cpu")
    tried = [Path(folder) / LIBRARY_FILE for folder in package.__path__]
    for path in tried:
        if path.is_file():
            return path
    raise PluginError(
        f"{LIBRARY_FILE} is not in {', '.join(str(path.parent) for path in tried)}; "
        "reinstall tokenspeed-kernels-aok with a C++ compiler at hand"
    )


@cache
def library() -> Library:
    """The library of this process, loaded on first use."""
    return Library(find_library(), os.environ.get(ISA_VARIABLE) or None)


def variant() -> str:
    """The instruction set in use, as the certificate names it."""
    return library().variant
