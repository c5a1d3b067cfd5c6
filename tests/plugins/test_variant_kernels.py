"""Negative controls: `verify` fails on every kernel that breaks its promise, and says where."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config_sources import load_config
from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.verify.invariance import NOT_AGAIN, verify_engine
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.report import Report
from tokenspeed.verify.scenario import Work
from tokenspeed.verify.scenarios import SCENARIOS

VARIANT = Path(__file__).parent / "variant"

SMALL = Work("small", 9, 6, 3, 2, (7,), prefixes=(1, 15, 16, 17, 33, 48, 64), long_tokens=66)

CAUGHT = {
    "variant.gemm.split_k": ("batch", "gemm.linear"),
    "variant.gemm.tile_by_batch": ("batch", "gemm.linear"),
    "variant.gemm.remainder_row": ("repeat", "gemm.linear"),
    "variant.gemm.threads": ("threads", "gemm.linear"),
    "variant.gemm.uninitialised": ("memory", "gemm.linear"),
    "variant.gemm.first_call": ("later", NOT_AGAIN),
    "variant.norm.large_batch": ("batch", "norm.rms"),
    "variant.activation.batch_scale": ("batch", "activation.silu_and_mul"),
    "variant.rope.batch_offset": ("chunks", "rope.apply"),
    "variant.cache.stale": ("preemption", "attention.paged"),
    "variant.attention.batch_max": ("order", "attention.paged"),
    "variant.attention.chunk_boundary": ("chunks", "attention.paged"),
    "variant.attention.split_by_batch": ("order", "attention.paged"),
    "variant.attention.page_order": ("memory", "attention.paged"),
    "variant.attention.padding": ("memory", "attention.paged"),
    "variant.sampling.batch_stream": ("batch", "sampling.sample"),
    "variant.sampling.stateful_stream": ("repeat", "sampling.sample"),
    "variant.sampling.ties_to_the_highest": ("ties", "sampling.sample"),
    "variant.logprobs.batch_max": ("batch", "sampling.logprobs"),
}
"""Kernel → the scenario that must catch it, and the operator that must be named, or why none can be."""

HONEST = {"cache.write": "variant.cache.honest", "attention.paged": "variant.attention.honest"}


@pytest.fixture
def variant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin, installed for one test, in the state of a new process."""
    monkeypatch.syspath_prepend(str(VARIANT))
    yield importlib.import_module("variant_kernels")
    for name in [name for name in sys.modules if name.partition(".")[0] == "variant_kernels"]:
        del sys.modules[name]


def verified(model: Path, pins: dict[str, str], *, only: tuple[str, ...] = ()) -> Report:
    config = load_config(
        {"model": str(model), "numerics": "rl-bitwise", "kernel": pins, "max_model_len": 512, "num_kv_pages": 64},
        environ={},
    )
    lab = Lab(config)
    assert set(pins.values()) <= {spec.name for spec in lab.plan.kernels()}
    return verify_engine(lab, SMALL, only=only)


def pins_of(kernel: str, plugin: Any) -> dict[str, str]:
    operator = plugin.KERNELS[kernel][0]
    return {**(HONEST if operator in HONEST else {}), operator: kernel}


@pytest.mark.parametrize("kernel", CAUGHT)
def test_caught(kernel: str, variant: Any, tiny_qwen3: Path) -> None:
    scenario, operator = CAUGHT[kernel]
    report = verified(tiny_qwen3, pins_of(kernel, variant), only=(scenario,))
    (result,) = report.results
    assert result.verdict == "differs", (result.verdict, result.error)
    assert not report.holds
    finding = result.findings[0]
    assert finding.difference.position >= 1
    assert operator in finding.location
    assert kernel in finding.location or operator not in OPERATORS


def test_every_dishonest_kernel_is_a_control(variant: Any) -> None:
    assert set(CAUGHT) == set(variant.KERNELS) - set(HONEST.values())
    assert len(CAUGHT) >= 12


def test_the_kit_passes_every_scenario(tiny_qwen3: Path) -> None:
    report = verified(tiny_qwen3, {})
    assert [result.scenario for result in report.results] == list(SCENARIOS)
    assert [
        line for result in report.results for line in (*result.findings, *result.missing, result.error) if line
    ] == []
    assert report.holds


def test_honest_kernels_written_like_the_others_pass(variant: Any, tiny_qwen3: Path) -> None:
    report = verified(tiny_qwen3, HONEST, only=("chunks", "preemption", "memory"))
    assert report.holds, [result.as_dict() for result in report.results]


def test_no_normal_start_sees_the_controls() -> None:
    from tokenspeed.plugins import load_plugins

    assert not any(report.name == "variant-kernels" for report in load_plugins().reports)
