"""`examples/grpo`: a short run of the real thing, repeated with and without the forward pass that can be skipped."""

from __future__ import annotations

import ast
import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo"


INSTALLED = {"matplotlib", "numpy", "safetensors", "tokenizers", "torch", "transformers"} | {
    "tokenspeed",
    "tokenspeed_models",
}
"""What the command in the guide installs and the scripts may therefore import."""


def test_it_imports_what_the_guide_installs() -> None:
    own = {path.stem for path in EXAMPLE.glob("*.py")}
    for path in EXAMPLE.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        foreign = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - own - INSTALLED
        assert foreign == ({"trl", "datasets"} if path.stem == "trl_grpo" else set()), path.name


def train(out: Path, *options: str) -> tuple[list[dict[str, str]], str]:
    """The lines of the CSV and the digest of the last weights."""
    command = [
        sys.executable,
        str(EXAMPLE / "train.py"),
        "--out",
        str(out),
        "--steps",
        "3",
        "--prompts",
        "12",
        *options,
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TOKENSPEED_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    with (out / "steps.csv").open(newline="") as file:
        return list(csv.DictReader(file)), done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo")


def test_no_token_differs_and_the_old_forward_can_be_skipped(runs: Path) -> None:
    rows, weights = train(runs / "bitwise", "--steps", "3")
    again, same_weights = train(runs / "recompute", "--steps", "3", "--old-logprobs", "recompute")
    for row in (*rows, *again):
        assert int(row["tokens"]) > 200
        assert int(row["differing_tokens"]) == 0
        assert float(row["max_abs_difference"]) == float(row["kl_k1"]) == float(row["kl_k3"]) == 0
        assert int(row["stale_rollouts"]) == 0
        assert 0 < float(row["reward"]) < 1
    assert weights == same_weights
    assert [row["fingerprint"] for row in rows] == [row["fingerprint"] for row in again]
    assert len({row["fingerprint"] for row in rows}) == 3, "every step serves other weights"


def test_a_stock_trainer_differs(runs: Path) -> None:
    rows, _ = train(runs / "stock", "--steps", "1", "--stock-trainer")
    assert all(int(row["differing_tokens"]) > 0 and float(row["max_abs_difference"]) > 0 for row in rows)


def test_the_plot_reads_them(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "plot.py"), str(EXAMPLE / "results"), "--output", str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "bitwise, reference-engine, stock-trainer" in done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
