"""A few forms compiled for GPUs that are not here; `nox -s triton-aot` compiles all of them.

Judged by the checks of `scripts/triton_aot.py`, which are shown to catch what they are for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import triton
import triton.language as tl

import triton_aot
from tokenspeed_kernels_aok.triton.launch import Form

SAMPLE = (
    r"gemm\.bf16\.64x64\.descriptors|gemm\.bf16\.128x256\.descriptors|gemm\.bf16\.16x64|gemm\.bf16\.64x128\..*odd|"
    r"attention\.paged\.bf16\.128|norm\.rms\.bf16\.1024|activation\.silu_and_mul\.bf16"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled earlier may answer for what is compiled here."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("target", "count"), [("sm80", 6), ("sm90", 6)])
def test_forms_compile_within_their_limits(target: str, count: int) -> None:
    reports = [triton_aot.compile_form(form) for form in triton_aot.all_forms([target], SAMPLE)]
    assert len(reports) == count
    assert {report.name: report.findings for report in reports if report.findings} == {}
    assert all(report.registers for report in reports)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_alignment_changes_no_matrix_instruction(target: str) -> None:
    """Triton compiles a form of its own for operands at any address; its sums must be those of the aligned one."""
    names = r"gemm\.bf16\.64x64\.pointers$|attention\.paged\.bf16\.64$"
    forms = list(triton_aot.all_forms([target], names))
    assert len(forms) == 2
    for form in forms:
        aligned, unaligned = map(triton_aot.compile_form, (form, dataclasses.replace(form, aligned=())))
        assert aligned.instructions
        assert unaligned.instructions == aligned.instructions, form.name


def test_every_form_of_every_target_is_listed_once() -> None:
    forms = list(triton_aot.all_forms(list(triton_aot.TARGETS), ""))
    assert len({(form.target, form.name) for form in forms}) == len(forms) > 300


@triton.jit
def _atomic_kernel(x, out):
    tl.atomic_add(out, tl.load(x + tl.program_id(0)))


@triton.jit
def _multiply_add_kernel(x, out):
    lane = tl.arange(0, 128)
    value = tl.load(x + lane)
    tl.store(out + lane, value * value + value)


@triton.jit
def _tf32_kernel(x, out):
    row = tl.arange(0, 64)
    at = row[:, None] * 64 + row[None, :]
    tile = tl.load(x + at)
    tl.store(out + at, tl.dot(tile, tile, input_precision="tf32"))


def _control(kernel: object) -> Form:
    return Form("control", "sm90", kernel, {"x": "*fp32", "out": "*fp32"}, {}, ("x", "out"))


@pytest.mark.parametrize(("kernel", "finding"), [(_atomic_kernel, "atomic in PTX"), (_tf32_kernel, "tf32 in PTX")])
def test_forbidden_instructions_are_found(kernel: object, finding: str) -> None:
    assert finding in "; ".join(triton_aot.compile_form(_control(kernel)).findings)


def test_contraction_is_found_where_fusion_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    form = _control(_multiply_add_kernel)
    assert triton_aot.compile_form(form).findings == []
    monkeypatch.setitem(triton_aot.OPTIONS, "enable_fp_fusion", True)
    assert "multiply" in "; ".join(triton_aot.compile_form(form).findings)


def test_another_matrix_instruction_than_the_tables_is_found() -> None:
    (form,) = triton_aot.all_forms(["sm90"], r"gemm\.bf16\.64x64\.descriptors")
    wider = dataclasses.replace(form, constants=form.constants | {"BLOCK_N": 128})
    wider.signature["weight"] = "tensordesc<bf16[128,64]>"
    findings = triton_aot.compile_form(wider).findings
    assert findings == ["matrix instructions ['m64n128k16'], the table states m64n64k16"]
