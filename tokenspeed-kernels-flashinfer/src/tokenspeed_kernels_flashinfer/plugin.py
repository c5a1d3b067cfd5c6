"""What this distribution registers with tokenspeed. Imports neither torch nor flashinfer."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed.hookspecs import hookimpl
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed_kernels_flashinfer.specs import SPECS

TOKENSPEED_API = 1


@hookimpl
def tokenspeed_kernels() -> Iterable[KernelSpec]:
    """Throughput kernels for NVIDIA GPUs; none declares a feature."""
    return SPECS
