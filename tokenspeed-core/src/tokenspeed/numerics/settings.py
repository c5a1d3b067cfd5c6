"""What a process must set before it computes on a GPU, so that libraries keep to the resolved switches.

Pure: from the switches and the environment to settings, and a problem for every variable that says the opposite. A
variable that somebody set is not overwritten, and does not outrank a switch either: the start is refused.
`engine.device` applies the settings, in the process that computes.

No layer, no part of the engine and no kernel of ours computes with cuBLAS, and NCCL moves nothing, as long as there is
one rank. The settings are for kernels of others. They hold for a whole process, so a trainer that the engine shares one
with is told what changes for it, and what may come too late for a library that runs already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tokenspeed.errors import Problem
from tokenspeed.kernels.spec import BATCH_INVARIANT
from tokenspeed.numerics.resolve import ResolvedNumerics


@dataclass(frozen=True)
class GpuSettings:
    """What to set, see `engine.device.apply_settings`; `note` tells what it means for a process that was in use before.

    `precision` is torch's, of matrix products of fp32: `high` may use TF32, `highest` may not. `environment` are
    variables for libraries that read them.
    """

    precision: str = "high"
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    note: str = ""


@dataclass(frozen=True)
class _Variable:
    """A variable that a library reads: the values that keep the promise; the first is set where there is none."""

    name: str
    kept_by: tuple[str, ...]
    for_what: str


# A workspace of fixed size makes cuBLAS choose the same algorithm in every stream: "Results reproducibility" in its
# documentation.
_CUBLAS = _Variable("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8"), "--kernel-features batch_invariant")
_NCCL = (
    _Variable("NCCL_ALGO", ("Ring",), "--collectives ordered"),
    _Variable("NCCL_PROTO", ("Simple",), "--collectives ordered"),
)
# It makes every cuBLAS of the process use TF32, whatever the program asks for; only 0 (or nothing) leaves it alone.
_TF32 = _Variable("NVIDIA_TF32_OVERRIDE", ("0",), "--no-tf32")


def gpu_settings(
    numerics: ResolvedNumerics, device: str, environ: Mapping[str, str], used_with: str = ""
) -> tuple[GpuSettings, tuple[Problem, ...]]:
    """The settings of a process on `device`, and the variables of `environ` that break a promise.

    `used_with` is the precision with which the process has used a GPU; empty if it has used none.
    """
    if device != "cuda":
        return GpuSettings(), ()
    switches = numerics.switches
    tf32 = switches["tf32"] == "on"
    wanted: list[_Variable] = []
    if BATCH_INVARIANT in numerics.features:
        wanted.append(_CUBLAS)
    if switches["collectives"] == "ordered":
        wanted += _NCCL
    problems = [problem for variable in wanted if (problem := _fault(variable, environ))]
    if not tf32 and (problem := _fault(_TF32, environ)):
        problems.append(problem)
    values = {variable.name: environ.get(variable.name, variable.kept_by[0]) for variable in wanted}
    precision = "high" if tf32 else "highest"
    note = _note(precision, {name: value for name, value in values.items() if name not in environ}, used_with)
    return GpuSettings(precision, MappingProxyType(values), note), tuple(problems)


def _note(precision: str, new: Mapping[str, str], used_with: str) -> str:
    changes = [f"torch's precision of fp32 products {precision} (it was {used_with})"] if precision != used_with else []
    changes += [f"{name}={value}" for name, value in new.items()]
    if not used_with or not changes:
        return ""
    late = f"; a library that runs already does not read {', '.join(new)} again" if new else ""
    return f"this process used the GPU before; everything in it now has {', '.join(changes)}{late}"


def _fault(variable: _Variable, environ: Mapping[str, str]) -> Problem | None:
    value = environ.get(variable.name)
    if value is None or value in variable.kept_by:
        return None
    return Problem(
        "environment",
        f"{variable.name}={value} is set, and {variable.for_what} needs {' or '.join(variable.kept_by)}",
        remedy=f"unset {variable.name}",
    )
