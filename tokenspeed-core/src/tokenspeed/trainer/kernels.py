"""Kernels by name, loaded once: what an operator's `kernel` argument refers to.

A `torch.library` operator takes plain values, so a call site names its kernel, and the name leads to the functions
here. Names are unique among all installed distributions (the plugin host sees to that).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.config import OPTIONS
from tokenspeed.errors import Problem, StartRefused
from tokenspeed.kernels.spec import KernelSpec


@dataclass(frozen=True)
class LoadedKernel:
    """An imported kernel; `prepare` packs a weight for it and is None when it takes weights as they are."""

    spec: KernelSpec
    run: Callable[..., Any]
    prepare: Callable[[Any], Any] | None


def read_options(plugins: object, kernel: object) -> tuple[tuple[str, ...] | None, Mapping[str, str]]:
    """A trainer's `plugins` and `kernel` as the engine reads its options of these names. Raises ValueError."""
    read = {}
    for name, value in (("plugins", plugins), ("kernel", kernel)):
        try:
            read[name] = None if value is None else OPTIONS[name].read(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return read["plugins"], read["kernel"] or {}


_loaded: dict[str, LoadedKernel] = {}


def load(specs: Iterable[KernelSpec]) -> None:
    """Import these kernels. Raises StartRefused, with every one that cannot be imported."""
    problems = []
    for spec in {spec.name: spec for spec in specs}.values():
        try:
            prepare = _function(spec.prepare_weights) if spec.prepare_weights else None
            _loaded[spec.name] = LoadedKernel(spec, _function(spec.implementation), prepare)
        except (Exception, SystemExit) as error:  # a kernel's module may raise anything at import
            problems.append(
                Problem(
                    "broken-kernel",
                    f"kernel {spec.name} of {spec.distribution} {spec.version} was chosen for {spec.operator} "
                    "and cannot be loaded",
                    (f"{spec.implementation}: {type(error).__name__}: {error}",),
                    f"repair {spec.distribution}, or pin another kernel",
                )
            )
    if problems:
        raise StartRefused(problems)


def loaded(name: str) -> LoadedKernel:
    """The kernel called `name`. Raises KeyError when nothing has loaded it in this process."""
    try:
        return _loaded[name]
    except KeyError:
        raise KeyError(f"kernel {name} is not loaded in this process; adopt the model here") from None


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
