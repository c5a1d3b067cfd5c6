"""Little plugin distributions, good and bad, that come in through real entry points."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

PREAMBLE = """
from tokenspeed import KernelSpec, MachineRequirement, ModelProfile, Priority, hookimpl, trait_table

def kernel(name, operator="gemm.linear", target="nowhere:linear", **more):
    roles = {"norm.rms": ("x",), "cache.write": ("x", "kv")}.get(operator, ("x", "weight"))
    more.setdefault("signatures", ({role: "bfloat16" for role in roles},))
    return KernelSpec(name, operator, "test", target, **more)

def on(**machine):
    return [kernel("a", machine=MachineRequirement(**machine))]
"""


class PluginFolder:
    """A folder on `sys.path` that holds installed distributions, each one module and its metadata."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modules: list[str] = []

    def install(self, name: str, source: str, *, version: str = "1.2.3", target: str | None = None) -> str:
        """Install distribution `name` whose entry point of the same name is a module with `source`. Returns `name`."""
        module = name.replace("-", "_")
        (self.path / f"{module}.py").write_text(PREAMBLE + textwrap.dedent(source))
        metadata = self.path / f"{module}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[tokenspeed]\n{name} = {target or module}\n")
        self.modules.append(module)
        return name

    def add_module(self, module: str, source: str) -> None:
        """Add a module that no entry point names."""
        (self.path / f"{module}.py").write_text(textwrap.dedent(source))
        self.modules.append(module)

    def run(self, *code_or_args: str) -> subprocess.CompletedProcess[str]:
        """Run this interpreter in a new process that has the plugins installed."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPEED_")}
        environ["PYTHONPATH"] = str(self.path)
        return subprocess.run(
            [sys.executable, *code_or_args], env=environ, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginFolder]:
    """An empty `PluginFolder`; its modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = PluginFolder(tmp_path)
    yield plugins
    for module in plugins.modules:
        sys.modules.pop(module, None)
