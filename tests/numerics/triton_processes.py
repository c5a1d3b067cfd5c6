"""Runs the cases of `triton_cases` in processes of their own: kernels find out at import what they run on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

CASES = Path(__file__).parent / "triton_cases"
SECONDS = 800
"""Most that the cases of one family may take."""


def assert_families_pass(at_least: Mapping[str, int], environment: Mapping[str, str]) -> None:
    """All cases of these families pass under `environment`, none is skipped, and of each at least so many ran.

    As many families run at once as there are CPUs, in the order given.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        results = executor.map(partial(_run, environment=environment), at_least)
        for (family, count), (status, output) in zip(at_least.items(), results, strict=True):
            assert status == 0, f"{family}: {output[-6000:]}"
            summary = output.strip().splitlines()[-1]
            passed = re.fullmatch(r"(\d+) passed in .*", summary)
            assert passed, f"{family}: {summary}"
            assert int(passed.group(1)) >= count, f"{family}: {summary}, expected at least {count}"


def _run(family: str, environment: Mapping[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES / f"{family}.py")]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS, cwd=CASES.parents[2])
    return done.returncode, done.stdout + done.stderr
