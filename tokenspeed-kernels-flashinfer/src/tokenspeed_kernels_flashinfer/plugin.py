"""The kernels of this distribution, as facts. Imports neither torch nor flashinfer."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed.hookspecs import hookimpl
from tokenspeed.kernels.spec import KernelSpec

TOKENSPEED_API = 1


@hookimpl
def tokenspeed_kernels() -> Iterable[KernelSpec]:
    """None yet: a kernel is listed here once it has passed the conformance kit on a GPU."""
    return []
