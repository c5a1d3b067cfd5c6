"""What holds where only `tokenspeed` and `tokenspeed-models` are installed: `nox -s tests-core-only`.

Core's own kernels promise nothing, so `rl-bitwise` is refused with everything that is missing, and `auto` serves.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

TOKENSPEED = str(Path(sys.executable).with_name("tokenspeed"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOKENSPEED, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_no_kernel_distribution_is_installed() -> None:
    """Otherwise nothing below would mean anything."""
    installed = {str(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    assert {name for name in installed if name.startswith("tokenspeed")} == {"tokenspeed", "tokenspeed-models"}


def test_bitwise_is_refused_with_every_operator_and_what_to_install() -> None:
    plan = json.loads(run("explain", "tiny", "--numerics", "auto", "--json").stdout)
    needed = {need["operator"] for need in plan["operators"]}
    assert {"gemm.linear", "attention.paged", "sampling.sample"} <= needed

    refused = run("serve", "--numerics", "rl-bitwise", "--port", "0")
    assert refused.returncode == 2
    assert "serving on" not in refused.stdout + refused.stderr
    # norm.add_rms serves `auto` alone: under rl-bitwise the layer boundary is not fused.
    for operator in needed - {"norm.add_rms"}:
        assert operator in refused.stderr, f"{operator} is not named in:\n{refused.stderr}"
    assert "batch_invariant" in refused.stderr
    assert "tokenspeed-kernels-aok" in refused.stderr
    assert "tokenspeed[aok]" in refused.stderr


def test_auto_serves() -> None:
    with subprocess.Popen([TOKENSPEED, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            shown = []
            address = None
            for line in server.stdout:
                shown.append(line)
                if address := re.search(r"serving on (http://\S+)", line):
                    break
            assert address, "".join(shown)
            body = {"prompt": "The cat", "max_tokens": 20, "seed": 1}
            request = urllib.request.Request(
                f"{address[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert json.load(reply)["choices"][0]["text"].startswith(" ")
        finally:
            server.terminate()
            assert server.wait(60) == 0
