"""The cases of the Triton kernels as the compiler leaves them, on an emulated H100 or H200 (`ptx_emulator`).

In a process of its own, since kernels find out at import what they run on. `nox -s triton-emulated` runs the other
architectures too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent / "triton_cases"
FAMILIES = {"gemm": 26, "rows": 24, "attention": 30, "sampling": 13, "engine": 2}


def test_every_family_compiled_for_sm90() -> None:
    """All cases pass, none is skipped, and as many as there ought to be did run."""
    environment = os.environ | {"TRITON_CASES_EMULATE": "sm90", "OMP_NUM_THREADS": "1"}
    files = [str(CASES / f"{family}.py") for family in FAMILIES]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, cwd=CASES.parents[2])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"=+ \d+ passed in .*=+", summary), summary
    for family, at_least in FAMILIES.items():
        assert len(re.findall(rf"{family}\.py::.* PASSED", done.stdout)) >= at_least, family
