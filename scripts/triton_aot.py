#!/usr/bin/env python3
"""Compile every form of every Triton kernel ahead of time, without a GPU, and check what came out.

For each target and each `Form` that the kernels list: registers, shared memory and spills (from the toolchain that
Triton carries), held to the limits below; the matrix instruction, held to the one that the tile table states; and in
the emitted PTX no atomics, no TF32, no dependent launch, no multiply or add that an assembler may contract, and no
fused multiply-add in the kernels whose source has none.

    python scripts/triton_aot.py                       every target and form, a table, exit status 1 on a finding
    python scripts/triton_aot.py --targets sm90 --match gemm --json out.json
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernels_aok.triton import families
from tokenspeed_kernels_aok.triton.launch import OPTIONS, Form

TARGETS = ("sm80", "sm86", "sm89", "sm90", "sm100", "gfx942")

# Shared memory that one block may use, in bytes: CUDA C programming guide, "Technical Specifications per Compute
# Capability"; for gfx942 the 64 KB of local data share of the CDNA 3 ISA guide.
SHARED_LIMIT = {"sm80": 166_912, "sm86": 101_376, "sm89": 101_376, "sm90": 232_448, "sm100": 232_448, "gfx942": 65_536}

# Bytes of stack of a thread. Zero for nearly all; a few registers that live across the inner loop are let pass.
SPILL_LIMIT = 64

FORBIDDEN = {
    "atomic": r"^\s*(@\S+ )?(atom|red|multimem)\.",
    "tf32": r"tf32",
    "dependent launch": r"griddepcontrol",
    "contractible f32 arithmetic": r"^\s*(@\S+ )?(add|sub|mul|mad)\.(ftz\.)?f32",
}

# Kernels whose source writes a fused multiply-add, so that PTX may hold some.
WRITES_FMA = ("activation.", "sampling.", "gemm.fp32", "attention.paged.fp32")

_MMA = re.compile(
    r"(wgmma\.mma_async\S*?\.m\d+n\d+k\d+|(?<!w)mma\.sync\S*?\.m\d+n\d+k\d+|tcgen05\.mma\S+|v_mfma_f32_\w+)"
)
_TENSOR_MEMORY = re.compile(r"blockM = (\d+), blockN = (\d+)")


@dataclass
class Report:
    """What one form compiled to; `findings` is empty when it passed."""

    target: str
    name: str
    num_warps: int
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int = 0
    instructions: list[str] = field(default_factory=list)
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)


def compile_form(form: Form) -> Report:
    """Compile `form` and check the result."""
    nvidia = form.target.startswith("sm")
    target = GPUTarget("cuda", int(form.target[2:]), 32) if nvidia else GPUTarget("hip", form.target, 64)
    names = list(form.kernel.arg_names)
    signature = {name: form.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in form.aligned}
    source = ASTSource(form.kernel, signature, constexprs=form.constants, attrs=aligned)
    options = dict(OPTIONS if nvidia else {"enable_fp_fusion": False})
    options |= {"num_warps": form.num_warps, "num_stages": form.num_stages}
    report = Report(form.target, form.name, form.num_warps)
    started = time.perf_counter()
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:
        report.findings.append(f"does not compile: {type(error).__name__}: {str(error).splitlines()[0]}")
        return report
    report.seconds = round(time.perf_counter() - started, 2)
    report.shared_bytes = compiled.metadata.shared
    text = compiled.asm["ptx"] if nvidia else compiled.asm["amdgcn"]
    report.instructions = sorted(set(_MMA.findall(text)) | _tensor_memory_shapes(compiled.asm["ttgir"]))
    if nvidia:
        report.registers, report.spilled_bytes = cuda_resources(compiled.asm["cubin"], form.target)
        report.findings += ptx_findings(form.name, text)
    else:
        report.registers, report.spilled_bytes = amd_resources(text)
    if report.spilled_bytes > SPILL_LIMIT:
        report.findings.append(f"spills {report.spilled_bytes} bytes, the limit is {SPILL_LIMIT}")
    if report.shared_bytes > SHARED_LIMIT[form.target]:
        report.findings.append(
            f"{report.shared_bytes} bytes of shared memory, the limit is {SHARED_LIMIT[form.target]}"
        )
    report.findings += instruction_findings(form, report.instructions)
    return report


def ptx_findings(name: str, ptx: str) -> list[str]:
    """What in `ptx` the promise forbids."""
    findings = [
        f"{what} in PTX: {match.group(0).strip()}"
        for what, pattern in FORBIDDEN.items()
        if (match := re.search(pattern, ptx, re.MULTILINE))
    ]
    if not name.startswith(WRITES_FMA) and re.search(r"\bfma\.\S*f32", ptx):
        findings.append("fused multiply-add in PTX, none in the source")
    return findings


def instruction_findings(form: Form, instructions: list[str]) -> list[str]:
    """Whether the matrix instruction is the one that the form's table states (tags hold it)."""
    (wanted,) = form.tags or ("",)
    if wanted == "":
        return []
    shapes = {_shape(instruction) for instruction in instructions} - {""}
    expected = set() if wanted == "fma" else {wanted}
    if shapes != expected:
        return [f"matrix instructions {sorted(shapes)}, the table states {wanted}"]
    return []


def _shape(instruction: str) -> str:
    """m64n64k16 from a PTX mnemonic, an MFMA name or a tensor-memory shape."""
    if match := re.search(r"m\d+n\d+k\d+", instruction):
        return match.group(0)
    if match := re.fullmatch(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_\w+", instruction):
        return "m{}n{}k{}".format(*match.groups())
    return ""


def _tensor_memory_shapes(ttgir: str) -> set[str]:
    """tcgen05 carries its shape in a run-time descriptor; the accumulator's tensor memory block tells M and N."""
    return {f"tcgen05 m{m}n{n}k16" for m, n in _TENSOR_MEMORY.findall(ttgir)}


def cuda_resources(cubin: bytes, target: str) -> tuple[int, int]:
    """(registers of a thread, bytes spilled to local memory) as cuobjdump and the ELF's code say."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump gave no resource usage for {target}: {text!r}")
    registers, stack, local = map(int, match.groups())
    return registers, stack + local


def amd_resources(assembly: str) -> tuple[int, int]:
    """(vector registers of a lane, bytes of scratch) from the kernel's metadata."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    scratch = re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    if registers is None or scratch is None:
        raise RuntimeError("the AMD assembly carries no resource metadata")
    return int(registers.group(1)), int(scratch.group(1))


def all_forms(targets: list[str], match: str) -> Iterator[Form]:
    """The forms of every family whose name matches the regular expression `match`."""
    for target in targets:
        for family in families():
            yield from (form for form in family.forms(target) if re.search(match, form.name))


def main() -> int:
    """Compile, print a table, write JSON; 1 when anything was found or nothing compiled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated, of " + ", ".join(TARGETS))
    parser.add_argument("--match", default="", help="regular expression that form names must match")
    parser.add_argument("--json", type=Path, help="write the reports here")
    arguments = parser.parse_args()
    reports = []
    for form in all_forms(arguments.targets.split(","), arguments.match):
        report = compile_form(form)
        reports.append(report)
        print(
            f"{report.target:7} {report.name:40} {report.registers or 0:4} registers "
            f"{report.shared_bytes:7} shared {report.spilled_bytes or 0:4} spilled "
            f"{report.seconds:5.1f} s  {'; '.join(report.findings) or 'ok'}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    failed = [report for report in reports if report.findings]
    print(f"{len(reports)} forms, {len(failed)} with findings")
    return 1 if failed or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
