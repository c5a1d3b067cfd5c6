"""`tokenspeed doctor`: everything about this environment that a report of a fault should carry, without secrets."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from tokenspeed import __version__
from tokenspeed.cli.output import json_option, print_json, print_table
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.machine import Machine, read_machine
from tokenspeed.numerics.plan import machine_dict
from tokenspeed.plugins import PluginHost, load_plugins

_PREFIXES = (
    "TOKENSPEED_",
    "AOK_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "CUDA_",
    "NCCL_",
    "TORCH",
    "PYTORCH",
    "HF_",
    "LD_PRELOAD",
)
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_DISTRIBUTIONS = ("torch", "numpy", "triton", "safetensors", "tokenizers", "transformers", "msgspec", "fastapi")


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Report on this environment: machine, libraries, plugins, kernels and variables that matter.

    Imports torch and every kernel that this machine could run. The exit status is 1 when something is broken.
    """
    torch = _torch()
    machine = read_machine("cuda" if torch.get("cuda") else "cpu")
    host = load_plugins()
    broken = dict(_kernel_faults(host, machine))
    report: dict[str, Any] = {
        "tokenspeed": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": machine_dict(machine),
        "torch": torch,
        "distributions": dict(_versions()),
        "plugins": {r.name: f"{r.distribution} {r.version}: {r.status} {r.error}".strip() for r in host.reports},
        "broken kernels": broken,
        "environment": dict(environment(os.environ)),
    }
    if as_json:
        print_json(report)
    else:
        print_table(("what", "value"), list(_rows(report)), wrapped=("value",))
    if broken or any(r.status in ("broken", "clash") for r in host.reports) or "error" in torch:
        raise click.exceptions.Exit(1)


def environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables that can change what tokenspeed does; values that may be secret are not shown."""
    for name in sorted(environ):
        if name.startswith(_PREFIXES):
            yield name, "(set)" if any(word in name for word in _SECRET) else environ[name]


def _torch() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"error": f"torch cannot be imported: {error}"}
    return {"version": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.cuda.is_available()}


def _versions() -> Iterator[tuple[str, str]]:
    for name in _DISTRIBUTIONS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _kernel_faults(host: PluginHost, machine: Machine) -> Iterator[tuple[str, str]]:
    """Kernels that this machine meets the requirements of and that cannot be imported."""
    for spec in KernelRegistry.from_plugins(host):
        if spec.machine.unmet(machine):
            continue
        for target in filter(None, (spec.implementation, spec.prepare_weights)):
            module, _, name = target.partition(":")
            try:
                getattr(importlib.import_module(module), name)
            except Exception as error:  # a kernel's module may raise anything at import
                yield spec.name, f"{spec.distribution} {spec.version}: {target}: {type(error).__name__}: {error}"


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in report.items():
        if not isinstance(value, Mapping):
            yield key, str(value)
        elif not value:
            yield key, "none"
        for name, item in value.items() if isinstance(value, Mapping) else ():
            shown = ", ".join(f"{k} {v}" for k, v in item.items()) if isinstance(item, Mapping) else item
            yield f"{key}: {name}", ", ".join(shown) if isinstance(shown, list) else str(shown)
