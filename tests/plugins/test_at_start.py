"""A start under rl-bitwise tries the chosen kernels: what over-promises is refused; the certificate says what ran."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tokenspeed.cli.main import cli
from tokenspeed.config_sources import load_config
from tokenspeed.errors import StartRefused
from tokenspeed.startup import launch, prepare
from tokenspeed.testing import at_start
from tokenspeed.testing.names import KIT_VERSION

BOASTING = """
import torch
from tokenspeed import BATCH_INVARIANT

def norm(x, weight, eps):
    wide = x.float()
    total = wide.square().sum(-1, keepdim=True)
    if len(x) > 8:
        total = torch.stack([part.square().sum(-1, keepdim=True) for part in wide.split(5, -1)]).sum(0)
    return (wide * torch.rsqrt(total / x.shape[-1] + eps)).to(x.dtype) * weight

@hookimpl
def tokenspeed_kernels():
    both = ("float32", "bfloat16")
    return [kernel("boasting.norm", "norm.rms", "boasting_kernels:norm", features=frozenset({BATCH_INVARIANT}),
                   signatures=tuple({"x": dtype, "weight": dtype} for dtype in both), priority=Priority.PLUGIN)]
"""


def start(model: Path | str, **options: Any) -> Any:
    config = {"model": str(model), "numerics": "rl-bitwise", "num_kv_pages": 64, "max_model_len": 256}
    return launch(prepare(load_config({**config, **options}, environ={})))


def test_an_over_promising_kernel_is_refused(folder: Any) -> None:
    folder.install("boasting-kernels", BOASTING)
    with pytest.raises(StartRefused) as caught:
        start("tiny")
    (problem,) = caught.value.problems
    assert problem.kind == "unproved-kernel"
    assert problem.summary == (
        "kernel boasting.norm of boasting-kernels 1.2.3 does not keep what it declares (batch_invariant)"
    )
    assert problem.details[0].startswith("batch: ")
    assert "--kernel norm.rms=NAME" in problem.remedy
    start("tiny", kernel={"norm.rms": "aok.norm.rms"})
    start("tiny", numerics="auto")


def test_verify_finds_it_and_saves_the_input(folder: Any, tmp_path: Path) -> None:
    folder.install("boasting-kernels", BOASTING)
    faults = tmp_path / "faults"
    result = CliRunner().invoke(
        cli, ["kernels", "verify", "--plugin", "boasting-kernels", "--faults", str(faults), "--json"]
    )
    assert result.exit_code == 1
    report = json.loads(result.output)
    (kernel,) = report["kernels"]
    failed = {check["check"] for check in kernel["checks"] if check["outcome"] == "failed"}
    assert "batch" in failed
    path = next(path for path in report["saved"] if ".batch." in path)
    replayed = CliRunner().invoke(cli, ["kernels", "verify", "--replay", path])
    assert replayed.exit_code == 1
    assert "boasting.norm (boasting-kernels 1.2.3): element" in replayed.output
    shown = CliRunner().invoke(cli, ["kernels", "verify", "--kernel", "boasting.norm", "--faults", str(faults)])
    assert shown.exit_code == 1
    assert "boasting.norm: batch failed: " in shown.output
    assert "0 passed, 1 failed, 0 not run" in shown.output


def test_the_certificate_records_what_ran() -> None:
    plan = prepare(load_config({"model": "tiny", "numerics": "rl-bitwise"}, environ={})).plan
    engine = start("tiny")
    proof = at_start.prove(plan)
    assert proof.seconds < 0.1, "what passed once in this process is tried again"
    kit = engine.certificate.provenance["kit"]
    assert kit["version"] == KIT_VERSION
    assert kit["result"] == "passed"
    assert set(kit["kernels"]) == {spec.name for spec in plan.kernels()}
    assert kit["checks"] == list(at_start.CHECKS_AT_START)
    assert start("tiny", numerics="auto").certificate.provenance["kit"] is None


def test_the_short_form_fits_its_budget() -> None:
    at_start._passed.clear()
    prepared = prepare(load_config({"model": "tiny", "numerics": "rl-bitwise"}, environ={}))
    prepared.plan.bind(prepared.built.context.operations)
    before = time.process_time()
    assert at_start.prove(prepared.plan).problems == ()
    assert time.process_time() - before < 2.0
