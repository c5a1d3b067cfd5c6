"""`KernelContractTests`: one test for each kernel of a plugin and each check of the kit. Needs pytest."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.machine import read_machine
from tokenspeed.plugins import load_plugins
from tokenspeed.testing.names import CHECKS
from tokenspeed.testing.subject import not_here
from tokenspeed.testing.verify import verify_kernel


class KernelContractTests:
    """Subclass it as `TestKernels`, and name the plugin.

    Kernels that need another device than `device` are not collected; `at_least` guards against collecting nothing.
    A check that a kernel cannot pass is waived in its spec (`waivers`), with a reason that users see, and not here.
    """

    plugin: ClassVar[str]
    device: ClassVar[str] = "cpu"
    at_least: ClassVar[int] = 1

    @classmethod
    def kernels(cls) -> list[KernelSpec]:
        """The plugin's kernels that this machine can run."""
        machine = read_machine(cls.device)
        host = load_plugins()
        mine = {name for report in host.reports if report.name == cls.plugin for name in report.kernels}
        return [spec for spec in host.kernels() if spec.name in mine and not not_here(spec, machine)]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each kernel and check."""
        if "check" in metafunc.fixturenames:
            found = [(spec, check) for spec in self.kernels() for check in CHECKS]
            metafunc.parametrize(("spec", "check"), found, ids=[f"{spec.name}-{check}" for spec, check in found])

    def test_claim(self, spec: KernelSpec, check: str) -> None:
        """The check passes, is waived with a reason, or has nothing to prove."""
        (result,) = verify_kernel(spec, read_machine(self.device), load_plugins().kernels(), only=(check,)).results
        assert result.outcome != "failed", explain(result)

    def test_kernels_were_found(self) -> None:
        """The plugin has kernels for this machine."""
        reports = [report.describe() for report in load_plugins().reports if report.name == self.plugin]
        assert len(self.kernels()) >= self.at_least, reports or f"no plugin is called {self.plugin}"


def explain(result: Any) -> str:
    """What a failed check says, with the inputs."""
    inputs = f"\ninputs: {result.fault.recipe.describe()}" if result.fault and result.fault.recipe else ""
    return f"{CHECKS[result.check].proves}: {result.reason}{inputs}"
