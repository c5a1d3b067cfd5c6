"""The cases of the Triton kernels as the compiler leaves them, on an emulated H100 or H200 (`ptx_emulator`).

`nox -s triton-emulated` runs the other architectures, and larger sizes.
"""

from __future__ import annotations

import pytest

from triton_processes import assert_families_pass

FAMILIES = {"gemm": 26, "attention": 31, "engine": 3, "sampling": 13, "rows": 24}


@pytest.mark.timeout(1200)  # two minutes on two idle cores
def test_every_family_compiled_for_sm90() -> None:
    """All cases pass, none is skipped, and as many as there ought to be did run."""
    assert_families_pass(FAMILIES, {"TRITON_CASES_EMULATE": "sm90"})
