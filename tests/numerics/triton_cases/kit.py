"""The conformance kit on every Triton kernel, as `tokenspeed kernels verify` runs it.

For a GPU. Interpreted or emulated, a kernel is taken for one of the CPU and very little is tried. Emulated, that takes
minutes for most kernels and an hour for projections and attention; interpreted, hours: name what you mean with `-k`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenspeed.kernels.spec import KernelSpec, MachineRequirement
from tokenspeed.machine import read_machine
from tokenspeed.testing import verify_kernel
from tokenspeed.testing.trial import Workload
from tokenspeed_kernels_aok.triton.launch import INTERPRETED, INTERPRETER_ARCH, arch_of
from tokenspeed_kernels_aok.triton.specs import triton_specs
from triton_cases.support import DEVICE, EMULATED

ARCH = arch_of(DEVICE) if EMULATED or DEVICE.type == "cuda" else INTERPRETER_ARCH


def _here(spec: KernelSpec) -> KernelSpec:
    return replace(spec, machine=MachineRequirement(), distribution="tokenspeed-kernels-aok")


SPECS = [spec for spec in triton_specs() if ARCH in spec.machine.arch]
if DEVICE.type == "cpu":
    SPECS = [_here(spec) for spec in SPECS]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_promise_of_the_kernel(spec: KernelSpec) -> None:
    work = Workload(batch_sizes=(1, 3), few=True) if INTERPRETED or EMULATED else None
    report = verify_kernel(spec, read_machine(DEVICE.type), SPECS, work=work)
    assert report.verdict == "passed", [(result.check, result.reason) for result in report.failures] or report.not_run
    assert {result.check for result in report.results if result.outcome == "passed"} >= {"agreement", "layout"}
