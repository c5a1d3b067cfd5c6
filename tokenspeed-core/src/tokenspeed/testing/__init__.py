"""The conformance kit for authors of plugins, and helpers for tests of engines and models.

`KernelContractTests`, `ModelContractTests` and `PluginTests` are pytest classes to subclass; `verify_kernel` is the
first without pytest, and what `tokenspeed kernels verify` runs. Importing this package imports neither torch nor
pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed.testing.contract_kernels import KernelContractTests as KernelContractTests
    from tokenspeed.testing.contract_models import ModelContractTests as ModelContractTests
    from tokenspeed.testing.contract_plugins import PluginTests as PluginTests
    from tokenspeed.testing.names import CHECKS as CHECKS
    from tokenspeed.testing.names import KIT_VERSION as KIT_VERSION
    from tokenspeed.testing.verify import verify_kernel as verify_kernel

_HOME = {
    "KernelContractTests": "contract_kernels",
    "ModelContractTests": "contract_models",
    "PluginTests": "contract_plugins",
    "CHECKS": "names",
    "KIT_VERSION": "names",
    "verify_kernel": "verify",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tokenspeed.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tokenspeed.testing.{_HOME[name]}"), name)
