"""Runs the checks of the kit on kernels and says what became of each claim. Needs no pytest.

A check *passed*, *failed*, was *waived* by its author with a written reason, or is *not claimed*: the kernel does not
declare what the check would prove. A kernel that this machine cannot run is reported as such and proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.machine import Machine
from tokenspeed.testing.checks import first_fault
from tokenspeed.testing.inputs import NoInputs, signatures
from tokenspeed.testing.names import CHECKS, applies
from tokenspeed.testing.subject import NoPartner, load_peers, load_subject, not_here
from tokenspeed.testing.trial import Fault, Trial, Workload

Outcome = Literal["passed", "failed", "waived", "not claimed"]

IMPORT = "import"


@dataclass(frozen=True)
class CheckResult:
    """What became of one check of one kernel. `trial` is there when `fault` can be reproduced with it."""

    check: str
    outcome: Outcome
    reason: str = ""
    fault: Fault | None = None
    trial: Trial | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        inputs = self.fault.recipe.describe() if self.fault and self.fault.recipe else None
        return {"check": self.check, "outcome": self.outcome, "reason": self.reason, "inputs": inputs}


@dataclass
class KernelReport:
    """One kernel: the results of its checks, or why it was not run here."""

    spec: KernelSpec
    not_run: str = ""
    results: list[CheckResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[CheckResult]:
        """The checks that failed."""
        return [result for result in self.results if result.outcome == "failed"]

    @property
    def verdict(self) -> str:
        """`passed`, `failed` or `not run`."""
        return "not run" if self.not_run else "failed" if self.failures else "passed"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kernel": self.spec.name,
            "operator": self.spec.operator,
            "distribution": self.spec.distribution,
            "version": self.spec.version,
            "verdict": self.verdict,
            "not_run": self.not_run,
            "checks": [result.as_dict() for result in self.results],
            "seconds": round(self.seconds, 3),
        }


def verify_kernel(
    spec: KernelSpec,
    machine: Machine,
    others: Iterable[KernelSpec] = (),
    *,
    work: Workload | None = None,
    only: Sequence[str] = (),
    listener: Callable[[KernelSpec, str], None] | None = None,
) -> KernelReport:
    """Run the checks on one kernel, for every dtype signature; `others` are where a partner over the cache may be.

    A check counts as failed at its first fault. `only` names checks; `listener` hears of each before it runs.
    """
    started = time.perf_counter()
    report = KernelReport(spec, not_here(spec, machine) or "")
    if report.not_run:
        return report
    others = list(others)
    trials: list[Trial] = []
    fault: Fault | None = None
    for dtypes in signatures(spec):
        try:
            subject, peers = load_subject(spec, dtypes, others), load_peers(spec, dtypes, others, machine)
            trials.append(Trial(subject, work or Workload(), peers))
        except (Exception, SystemExit) as error:  # a kernel's module may raise anything at import
            text = str(error) if isinstance(error, NoPartner) else f"{type(error).__name__}: {error}"
            fault = Fault(text)
    wanted = [name for name in CHECKS if not only or name in only]
    for name in wanted:
        if listener:
            listener(spec, name)
        report.results.append(_result(name, spec, trials, fault))
        if name == IMPORT and fault is not None:
            break
    report.seconds = time.perf_counter() - started
    return report


def _result(name: str, spec: KernelSpec, trials: Sequence[Trial], import_fault: Fault | None) -> CheckResult:
    if reason := spec.waivers.get(name):
        return CheckResult(name, "waived", reason)
    if not applies(name, spec):
        return CheckResult(name, "not claimed", f"declares no {CHECKS[name].feature or 'bit order'}")
    if name == IMPORT:
        return CheckResult(name, "failed", import_fault.summary, import_fault) if import_fault else _passed(name)
    for trial in trials:
        try:
            fault = first_fault(name, trial)
        except NoInputs as error:
            fault = Fault(str(error))
        if fault is not None:
            dtypes = ", ".join(f"{role} {dtype}" for role, dtype in sorted(trial.subject.dtypes.items()))
            return CheckResult(name, "failed", f"{fault.summary} ({dtypes})", fault, trial)
    return _passed(name)


def _passed(name: str) -> CheckResult:
    return CheckResult(name, "passed")
