"""Every case of the Triton kernels in Triton's interpreter, each family in a process of its own.

TRITON_INTERPRET has to be set before Triton is imported, which this process may have done already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "triton_cases"


@pytest.mark.parametrize(("family", "at_least"), [("gemm", 30), ("rows", 20), ("attention", 12), ("sampling", 13)])
def test_family(family: str, at_least: int) -> None:
    """All cases of the family pass, none is skipped, and as many as there ought to be did run."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES / f"{family}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=CASES.parents[2])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    passed = re.match(r"(\d+) passed in", summary)
    assert passed, summary
    assert int(passed.group(1)) >= at_least, summary
