"""The native library: which variant runs, that it is checked, and that it leaves the process as it found it."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aok_support import VARIANTS, awkward, threads
from oracle import functions
from tokenspeed.errors import PluginError
from tokenspeed_kernels_aok.cpu import gemm, rows
from tokenspeed_kernels_aok.cpu.library import ISA_VARIABLE, Library, library
from tokenspeed_kernels_aok.cpu.selfcheck import verify
from tokenspeed_kernels_aok.specs import SPECS


def test_the_best_supported_variant_is_used() -> None:
    assert Library(library().path).variant == VARIANTS[-1]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_environment_forces_a_variant(name: str) -> None:
    code = "from tokenspeed_kernels_aok.cpu import gemm; print(gemm.library().variant)"
    code = code.replace("gemm.library()", "__import__('tokenspeed_kernels_aok.cpu.library').cpu.library.library()")
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, ISA_VARIABLE: name}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == name


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(PluginError, match=f"{ISA_VARIABLE}='sse9': this CPU and this build have .*portable"):
        Library(library().path, "sse9")
    with pytest.raises(PluginError, match="kernel variant 'sse9'"):
        library().kernel("gemm", gemm._GEMM, "sse9")


def test_a_library_of_another_version_is_refused() -> None:
    with pytest.raises(PluginError, match=r"kernel gemm takes 128 bytes of arguments, this package packs 8"):
        library().kernel("gemm", struct.Struct("q"))


def test_a_kernel_with_other_bits_is_refused() -> None:
    right = library().kernel("gemm", gemm._GEMM)

    def wrong(block: bytes) -> None:
        fields = list(gemm._GEMM.unpack(block))
        fields[2] = 0  # forgets the bias
        right(gemm._GEMM.pack(*fields))

    verify(library(), "gemm", gemm._check_gemm, right, right)
    with pytest.raises(PluginError, match=r"kernel gemm: variant .* and the portable variant give different bits on"):
        verify(library(), "gemm", gemm._check_gemm, wrong, right)


def test_denormals_are_back_after_a_call() -> None:
    x = awkward("normal", 64, 512, dtype=torch.bfloat16)
    packed = gemm.prepare_linear(awkward("normal", 512, 512, dtype=torch.bfloat16, seed=1))
    tiny = torch.full((1 << 20,), 1e-40)
    with threads(2):
        gemm.linear(x, packed)
        rows.silu_and_mul(x)
        assert bool((tiny * 1.0 > 0).all())  # on the caller's thread and on the workers'


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(mapped) == 1, mapped


def test_every_spec_names_code_that_exists_and_its_bit_order() -> None:
    for spec in SPECS:
        for target in (spec.implementation, spec.prepare_weights):
            if target:
                module, _, function = target.partition(":")
                assert callable(getattr(__import__(module, fromlist=[function]), function)), target
        assert spec.bit_order == f"aok/{spec.operator}@1"
        assert "batch_invariant" in spec.features


def test_the_published_constants_are_those_of_the_oracle() -> None:
    page = Path(__file__).parents[2].joinpath("docs/design/bits.md").read_text()
    published = {float.fromhex(text) for text in re.findall(r"-?0x1\.?[0-9a-f]*p-?\d+", page)}
    used = [*functions.EXP2[1:], *functions.EXP[2:], *functions.LOG]
    used += [functions.LOG2E, functions.LN2_HIGH, functions.LN2_LOW, functions._SHIFT]
    assert {float(value) for value in used} <= published
