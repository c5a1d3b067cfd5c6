"""Where the cases run: in the interpreter, on a GPU, or on an emulated one (TRITON_CASES_EMULATE=sm90)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

_running_on = ExitStack()

if arch := os.environ.get("TRITON_CASES_EMULATE"):
    from ptx_emulator.driver import emulate

    _running_on.enter_context(emulate(arch))  # before any case is imported


def pytest_unconfigure() -> None:
    """Give Triton its own driver back."""
    _running_on.close()


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """Interpreted kernels compute infinities and NaN on purpose; IEEE exceptions are results, not faults."""
    with np.errstate(all="ignore"):
        yield
