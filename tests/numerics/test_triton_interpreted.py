"""The cases of the Triton kernels in the interpreter, in another process; `nox -s triton-interpreted` runs larger ones.

TRITON_INTERPRET has to be set before Triton is imported, which this process may have done already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent / "triton_cases"
FAMILIES = {"gemm": 26, "rows": 20, "attention": 13, "sampling": 13}


def test_every_family() -> None:
    """All cases pass, none is skipped, and as many as there ought to be did run."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(CASES / f"{family}.py") for family in FAMILIES]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=CASES.parents[2])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"=+ \d+ passed in .*=+", summary), summary
    for family, at_least in FAMILIES.items():
        assert len(re.findall(rf"{family}\.py::.* PASSED", done.stdout)) >= at_least, family
