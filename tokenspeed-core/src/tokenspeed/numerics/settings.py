"""What a process must set before it touches a GPU, so that libraries keep to the resolved switches.

Pure: from the switches and the environment to settings, and a problem for every variable that says the opposite. A
variable that somebody set is not overwritten, and does not outrank a switch either: the start is refused.
`engine.device` applies the settings, in the process that computes.
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
    """`tf32`: whether matrix products of fp32 may use it. `environment`: variables for libraries that read them."""

    tf32: bool = True
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


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
    numerics: ResolvedNumerics, device: str, environ: Mapping[str, str]
) -> tuple[GpuSettings, tuple[Problem, ...]]:
    """The settings of a process on `device`, and the variables of `environ` that break a promise."""
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
    return GpuSettings(tf32, MappingProxyType(values)), tuple(problems)


def _fault(variable: _Variable, environ: Mapping[str, str]) -> Problem | None:
    value = environ.get(variable.name)
    if value is None or value in variable.kept_by:
        return None
    return Problem(
        "environment",
        f"{variable.name}={value} is set, and {variable.for_what} needs {' or '.join(variable.kept_by)}",
        remedy=f"unset {variable.name}",
    )
