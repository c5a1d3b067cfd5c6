"""Tests of this folder need a CUDA GPU; without one they are deselected (and counted as such), never skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is here with `gpu`, and deselect it where there is no GPU."""
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
    if here and not torch.cuda.is_available():
        config.hook.pytest_deselected(items=here)
        items[:] = [item for item in items if item not in here]
