"""The pipelines that pages show run as written: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from doc_pages import ROOT, Block, blocks

PIPELINES = [
    (block, line)
    for block in blocks("sh")
    for line in block.text.splitlines()
    if line.startswith("echo ") and "| tokenspeed " in line
]


def test_pipelines_are_found() -> None:
    assert len(PIPELINES) >= 4


@pytest.mark.parametrize(("block", "line"), PIPELINES, ids=[f"{block}" for block, _ in PIPELINES])
def test_pipeline_runs(block: Block, line: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(reply) for reply in done.stdout.splitlines()], done.stderr
