"""A disk that is full is the user's to mend: one line, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOKENSPEED = str(Path(sys.executable).with_name("tokenspeed"))


@pytest.mark.parametrize(
    "arguments", [("plugins",), ("plugins", "--json"), ("kernels", "list"), ("numerics", "explain")]
)
def test_the_output_cannot_be_written(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [TOKENSPEED, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert done.stderr == "tokenspeed: the output cannot be written: No space left on device\n"
    assert done.returncode == 1
