"""What this distribution registers with tokenspeed. Imports neither torch nor NumPy."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed import KernelSpec, MachineRequirement, Priority, hookimpl

TOKENSPEED_API = 1


@hookimpl
def tokenspeed_kernels() -> Iterable[KernelSpec]:
    """`norm.rms`, preferred to the built-in kernels under `auto`; it declares no feature."""
    return [
        KernelSpec(
            name="numpy.norm.rms",
            operator="norm.rms",
            solution="numpy",
            implementation="tokenspeed_kernels_numpy.norm:rms_norm",
            signatures=tuple({"x": dtype, "weight": dtype} for dtype in ("float32", "bfloat16")),
            machine=MachineRequirement(device="cpu", libraries=frozenset({"numpy"})),
            priority=Priority.PLUGIN,
        )
    ]
