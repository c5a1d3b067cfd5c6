"""Interpreted kernels compute infinities and NaN on purpose; NumPy must not warn of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """IEEE exceptions are results, not faults."""
    with np.errstate(all="ignore"):
        yield
