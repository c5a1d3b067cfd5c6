"""The emulated GPU itself: its arithmetic, what it refuses, and faults of a compiled kernel that it must see."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from oracle import ieee
from ptx_emulator import arithmetic, matrix
from ptx_emulator.copies import TensorMap
from ptx_emulator.driver import assemble, emulate
from ptx_emulator.machine import Fault, Launch, Machine, run
from ptx_emulator.memory import GlobalMemory
from ptx_emulator.program import parse

ARCHITECTURES = ("sm80", "sm90")


@triton.jit
def _row_sums(x, out, N: tl.constexpr):
    """Row sums by Triton's own reduction, whose order is the compiler's."""
    row = tl.program_id(0)
    tl.store(out + row, tl.sum(tl.load(x + row * N + tl.arange(0, N))))


@triton.jit
def _multiply_blocks(x, weight, out, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """x [M, depth] times weight [N, depth] transposed, pipelined over three stages."""
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None], tl.arange(0, K)[None, :]
    total = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, depth, K, num_stages=3):
        total = tl.dot(tl.load(x + m * depth + start + k), tl.load(weight + n * depth + start + k).T, total)
    tl.store(out + m * N + tl.arange(0, N)[None, :], total)


@triton.jit
def _copy_past_the_end(x, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out + lane, tl.load(x + lane + 1))


@triton.jit
def _everybody_to_one_place(x, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out + lane * tl.load(x + lane).to(tl.int32), lane.to(tl.float32))


def _sums(x: torch.Tensor, num_warps: int) -> torch.Tensor:
    out = torch.empty(len(x))
    _row_sums[(len(x),)](x, out, N=x.shape[1], num_warps=num_warps, enable_fp_fusion=False)
    return out


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(x), len(weight))
    sizes = {"M": len(x), "N": len(weight), "K": 32}
    _multiply_blocks[(1,)](x, weight, out, x.shape[1], **sizes, num_warps=4, enable_fp_fusion=False)
    return out


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_runs_what_the_compiler_made_where_the_interpreter_runs_the_source(arch: str) -> None:
    """The order of `tl.sum` follows the number of warps in compiled code alone."""
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    with emulate(arch):
        one, four = _sums(x, 1), _sums(x, 4)
    torch.testing.assert_close(one, x.sum(1), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(four, one, rtol=1e-4, atol=1e-3)
    assert not torch.equal(one, four)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pipelined_products_agree_and_depend_on_every_wait(arch: str, dtype: torch.dtype) -> None:
    """Without the waits for its asynchronous copies the same kernel computes something else."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 160, generator=generator).to(dtype) for rows in (64, 32))
    expected = x.double() @ weight.double().T
    with emulate(arch):
        product = _product(x, weight)
    assert (product - expected).abs().max() < 1e-4
    with emulate(arch, edit=lambda ptx: re.sub(r"cp\.async\.wait_group\s+\d+;", "", ptx)):
        hasty = _product(x, weight)
    assert not torch.equal(hasty, product)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (_copy_past_the_end, "memory that is no tensor's"),
        (_everybody_to_one_place, "different values to one address"),
    ],
)
def test_what_nobody_should_rely_on_is_a_fault(kernel: triton.JITFunction, message: str) -> None:
    with emulate("sm90"), pytest.raises(Fault, match=message):
        kernel[(1,)](torch.zeros(128), torch.zeros(128), N=128, enable_fp_fusion=False)


def _run(body: str, *, threads: int = 64) -> None:
    """Execute the statements `body` in one block of threads."""
    text = f""".visible .entry made_up(
    .param .u32 made_up_param_0
)
{{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 40;
{body}
    ret;
}}
"""
    launch = Launch(90, (1, 1, 1), threads, 64, (np.uint32(0),), GlobalMemory([]))
    run(assemble(parse(text)), Machine(launch, range(1)))


def test_a_barrier_that_some_threads_pass_by_is_a_fault() -> None:
    _run("@%p1 bra $L1;\n$L1:\nbar.sync 0;")
    with pytest.raises(Fault, match="never reach"):
        _run("@%p1 bra $L1;\nbar.sync 0;\nbar.sync 0;\n$L1:\nbar.sync 0;")


def test_lanes_that_have_parted_cannot_exchange_values() -> None:
    _run("shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;")
    with pytest.raises(Fault, match="lanes of a warp have parted"):
        _run("@%p1 bra $L1;\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n$L1:\nbar.sync 0;")


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"tensormap\.replace"):
        _run("tensormap.replace.b32 %r1, 0;")


def test_fused_multiply_add_rounds_once() -> None:
    """Against the oracle's, away from denormals, which this one keeps."""
    a, b, c = np.random.default_rng(0).standard_normal((3, 100_000)).astype(np.float32)
    fused = arithmetic._fma(a, b, -(a * b) * (1 + c * np.float32(2**-20)))
    expected = ieee.fma(a, b, -(a * b) * (1 + c * np.float32(2**-20)))
    assert np.array_equal(fused, expected)
    assert not np.array_equal(a * b + c, arithmetic._fma(a, b, c))


def test_bf16_is_rounded_as_torch_rounds() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    ours = arithmetic.to_bf16(values)
    torchs = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(ours, torchs)
    tie_that_is_none = np.float64(1 + 2**-8 + 2**-40)  # rounded to binary32 first it would be a tie
    assert arithmetic.to_bf16(np.array([tie_that_is_none])) == 0x3F81


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_whose_barriers_were_cut_out_is_a_fault(arch: str) -> None:
    x, weight = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(32, 64, dtype=torch.bfloat16)
    with emulate(arch, edit=lambda ptx: re.sub(r"bar\.sync\s+0;", "", ptx)), pytest.raises(Fault, match="last barrier"):
        _product(x, weight)


@pytest.mark.parametrize("arch", matrix.UNITS)
def test_the_matrix_unit_cuts_off_what_lies_far_below_its_largest_term(arch: int) -> None:
    """Against the model in exact integers, one element at a time; and one term of which too little is left."""
    unit = matrix.UNITS[arch]
    generator = np.random.default_rng(0)
    a, b = (
        arithmetic.from_bf16(
            arithmetic.to_bf16(generator.standard_normal((3, 16)) * 2.0 ** generator.integers(-9, 9, (3, 16)))
        )
        for _ in range(2)
    )
    c = generator.standard_normal((3, 3)).astype(np.float32)
    product = matrix.multiply(unit, a, b.T, c, "bf16")
    for i in range(3):
        for j in range(3):
            assert product[i, j] == _cut_sum(unit, a[i], b[j], c[i, j])
    assert np.abs(product - (a.astype(np.float64) @ b.T + c)).max() < 1e-2
    one, tiny = np.ones((1, 16), np.float32), np.full((16, 1), 2.0 ** -(unit.bits + 1), np.float32)
    assert matrix.multiply(unit, one, tiny, np.ones((1, 1), np.float32), "bf16") == 1.0


def _cut_sum(unit: matrix.Unit, a: np.ndarray, b: np.ndarray, c: np.float32) -> np.float32:
    total = Fraction(float(c))
    for start in range(0, len(a), unit.depth):
        part = slice(start, start + unit.depth)
        terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[part], b[part], strict=True)]
        exponents = [math.frexp(x)[1] + math.frexp(y)[1] - 2 for x, y in zip(a[part], b[part], strict=True)]
        quantum = Fraction(2) ** (max(*exponents, math.frexp(total)[1] - 1) - unit.bits)
        total = sum(math.trunc(term / quantum) for term in (*terms, total)) * quantum
        last = Fraction(2) ** (math.frexp(total)[1] - 24)
        total = math.trunc(total / last) * last
    return np.float32(float(total))


def test_a_tensor_map_that_the_driver_refuses_is_a_fault() -> None:
    good = {"address": 256, "element_bytes": 2, "box": (64, 64), "shape": (3, 40), "row_bytes": 96, "swizzle": 3}
    TensorMap(**good)
    for change in ({"address": 258}, {"row_bytes": 90}, {"box": (512, 64)}, {"box": (64, 128)}, {"shape": (0, 40)}):
        with pytest.raises(Fault):
            TensorMap(**good | change)
