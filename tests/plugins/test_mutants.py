"""The conformance kit against kernels that break a claim: every one is caught, and by the check that is named here."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenspeed import KernelSpec
from tokenspeed.machine import read_machine
from tokenspeed.plugins import load_plugins
from tokenspeed.testing.names import CHECKS
from tokenspeed.testing.reproduce import replay, save_fault
from tokenspeed.testing.verify import KernelReport, verify_kernel

HERE = Path(__file__).parent

CAUGHT_BY = {
    "gemm.no_such_function": "import",
    "gemm.half_sums": "accumulation",
    "gemm.short_mantissa": "accumulation",
    "gemm.packed_by_first_batch": "batch",
    "gemm.plan_of_first_shape": "history",
    "gemm.static_output": "writes",
    "gemm.forgets_bias": "agreement",
    "gemm.any_dtype": "refuses",
    "gemm.any_width": "refuses",
    "norm.aligned_path": "layout",
    "norm.nan_payload": "batch",
    "norm.assumes_contiguous": "layout",
    "norm.crashes_on_nothing": "empty",
    "norm.half_range": "accumulation",
    "norm.thread_split": "threads",
    "norm.declares_too_much": "traits",
    "silu.in_place": "writes",
    "silu.returns_a_view": "writes",
    "silu.unwritten_tail": "initialised",
    "embedding.drops_rows": "batch",
    "rope.ignores_interleaved": "agreement",
    "rope.rotates_everything": "agreement",
    "cache.wraps_negative_slots": "batch",
    "cache.writes_whole_pages": "batch",
    "attention.ignores_window": "agreement",
    "experts.in_expert_order": "traits",
    "experts.capacity": "batch",
    "experts.forgets_identity": "agreement",
    "topk.last_of_equals": "agreement",
    "sparse.by_slot": "layout",
    "sumexp.whole_row": "agreement",
    "logprobs.ignores_temperature": "agreement",
    "sample.noise_by_row": "batch",
    "sample.keeps_ties": "agreement",
    "norm.borrowed_order": "order",
}
"""Mutant → the first check, in the kit's order, that fails."""

VARIANTS_CAUGHT_BY = {
    "variant.gemm.split_k": "batch",
    "variant.gemm.tile_by_batch": "batch",
    "variant.gemm.remainder_row": "batch",
    "variant.gemm.threads": "threads",
    "variant.gemm.uninitialised": "history",
    "variant.gemm.first_call": "history",
    "variant.norm.large_batch": "batch",
    "variant.activation.batch_scale": "batch",
    "variant.rope.batch_offset": "batch",
    "variant.cache.stale": "batch",
    "variant.attention.batch_max": "batch",
    "variant.attention.chunk_boundary": "batch",
    "variant.attention.split_by_batch": "batch",
    "variant.attention.page_order": "layout",
    "variant.attention.padding": "initialised",
    "variant.sampling.batch_stream": "agreement",
    "variant.sampling.stateful_stream": "agreement",
    "variant.sampling.ties_to_the_highest": "agreement",
    "variant.logprobs.batch_max": "batch",
}
"""Kernels that `numerics verify` has for negative controls → the check that proves the claim which they break.

Some of them cannot do windows or empty batches either, so that it need not be the first that fails.
"""


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import one of the two packages, as new; forgotten afterwards."""

    def load(package: str) -> Any:
        monkeypatch.syspath_prepend(str(HERE / package.removesuffix("_kernels")))
        return importlib.import_module(package)

    yield load
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mutant_kernels", "variant_kernels")]:
        del sys.modules[name]


def first_failure(spec: KernelSpec) -> KernelReport:
    """Run checks in the kit's order up to the first that fails."""
    report = KernelReport(spec)
    for check in CHECKS:
        report = verify_kernel(spec, read_machine(), load_plugins().kernels(), only=(check,))
        if report.failures:
            break
    return report


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_mutant_is_caught(name: str, imported: Any) -> None:
    report = first_failure(imported("mutant_kernels").spec(name))
    assert [result.check for result in report.failures] == [CAUGHT_BY[name]], report.as_dict()


@pytest.mark.parametrize("name", VARIANTS_CAUGHT_BY)
def test_variant_is_caught(name: str, imported: Any) -> None:
    specs = {spec.name: spec for spec in imported("variant_kernels").tokenspeed_kernels()}
    report = verify_kernel(specs[name], read_machine(), only=(VARIANTS_CAUGHT_BY[name],))
    assert report.failures, report.as_dict()


@pytest.mark.parametrize("name", ["honest.norm", "honest.gemm", "honest.experts"])
def test_honest_kernel_passes(name: str, imported: Any) -> None:
    report = verify_kernel(imported("mutant_kernels").spec(name), read_machine())
    assert [result.as_dict() for result in report.failures] == []
    assert {result.check for result in report.results if result.outcome == "passed"} == set(CHECKS) - {"order"}


def test_every_mutant_and_every_variant_is_listed(imported: Any) -> None:
    assert set(CAUGHT_BY) == set(imported("mutant_kernels").MUTANTS)
    variants = imported("variant_kernels").KERNELS
    assert set(VARIANTS_CAUGHT_BY) == {name for name in variants if "honest" not in name}
    assert len(CAUGHT_BY) >= 20
    # Every check of the kit has a mutant that only it stops first.
    assert set(CAUGHT_BY.values()) == set(CHECKS)


def test_a_failure_is_saved_small_and_replayed(imported: Any, tmp_path: Path) -> None:
    spec = imported("mutant_kernels").spec("norm.nan_payload")
    report = verify_kernel(spec, read_machine(), only=("batch",))
    (failure,) = report.failures
    path = save_fault(tmp_path, spec, failure)
    assert path is not None
    replayed, difference = replay(path, [spec])
    assert replayed.name == spec.name
    assert difference is not None
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        got = json.loads(file.metadata()["got"])
        # Two rows are the fewest that have a second one.
        assert [len(call) for call in got["calls"]] == [2]
        assert {"expected.result.0", "got.result.0", "got.argument.x"} <= set(file.keys())
    repaired = replace(spec, implementation="mutant_kernels.rows:honest_norm")
    assert replay(path, [repaired]) == (repaired, None)
