"""tokenspeed: an LLM inference engine whose rollouts are bitwise reproducible, with kernels and models as plugins.

The names below are the public interface; they load on first use, so that importing `tokenspeed` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed.engine.request import SamplingParams as SamplingParams
    from tokenspeed.hookspecs import hookimpl as hookimpl
    from tokenspeed.kernels.spec import BATCH_INVARIANT as BATCH_INVARIANT
    from tokenspeed.kernels.spec import KernelSpec as KernelSpec
    from tokenspeed.kernels.spec import MachineRequirement as MachineRequirement
    from tokenspeed.kernels.spec import Priority as Priority
    from tokenspeed.kernels.spec import trait_table as trait_table
    from tokenspeed.llm import LLM as LLM
    from tokenspeed.machine import Machine as Machine
    from tokenspeed.models.profile import ModelProfile as ModelProfile

__version__ = "1!0.1.0"

_HOME = {
    "LLM": "tokenspeed.llm",
    "SamplingParams": "tokenspeed.engine.request",
    "hookimpl": "tokenspeed.hookspecs",
    "BATCH_INVARIANT": "tokenspeed.kernels.spec",
    "KernelSpec": "tokenspeed.kernels.spec",
    "MachineRequirement": "tokenspeed.kernels.spec",
    "Priority": "tokenspeed.kernels.spec",
    "trait_table": "tokenspeed.kernels.spec",
    "Machine": "tokenspeed.machine",
    "ModelProfile": "tokenspeed.models.profile",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tokenspeed' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
