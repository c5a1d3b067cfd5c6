"""What this distribution registers with tokenspeed."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed.hookspecs import hookimpl
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed_kernels_aok.specs import SPECS
from tokenspeed_kernels_aok.triton.specs import triton_specs

TOKENSPEED_API = 1


@hookimpl
def tokenspeed_kernels() -> Iterable[KernelSpec]:
    """The CPU kernels and the Triton kernels; every one is batch invariant."""
    return (*SPECS, *triton_specs())
