"""The cases of the Triton kernels in the interpreter; `nox -s triton-interpreted` runs larger ones."""

from __future__ import annotations

from triton_processes import assert_families_pass

FAMILIES = {"gemm": 26, "attention": 13, "sampling": 13, "rows": 20}


def test_every_family_interpreted() -> None:
    """All cases pass, none is skipped, and as many as there ought to be did run."""
    assert_families_pass(FAMILIES, {"TRITON_INTERPRET": "1"})
