"""This process = a new one, one thread = several, and one instruction set = every other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.verify.items import Item, make_items, result_digest
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import together

PROGRAM = """
import json, os, sys
from tokenspeed.config_sources import load_config
from tokenspeed.verify.items import make_items, result_digest
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import together

model, threads = sys.argv[1], int(sys.argv[2])
lab = Lab(load_config({"model": model, "numerics": "rl-bitwise"}))
items = make_items(16, vocab_size=lab.vocab_size, longest=400, output_tokens=12)
outcomes = lab.run(together(items, threads=threads)).outcomes
kernels = lab.certificate.provenance["kernels"]
print(json.dumps({
    "pid": os.getpid(),
    "digest": result_digest(zip(items, outcomes)),
    "fingerprint": lab.certificate.fingerprint,
    "variants": sorted({kernel["variant"] for kernel in kernels}),
    "notes": list(lab.plan.notes),
}))
"""


def elsewhere(model: Path, *, threads: int = 1, isa: str | None = None, **variables: str) -> dict[str, Any]:
    """The same items in a new process."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPEED_")}
    environ |= variables
    if isa is not None:
        environ["TOKENSPEED_AOK_ISA"] = isa
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(threads)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def digest_here(lab: Lab, items: list[Item]) -> str:
    return result_digest((item, lab.alone(item)) for item in items)


def supported_variants() -> list[str]:
    from tokenspeed_kernels_aok.cpu.library import library

    return list(library().supported_variants())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads: int, lab: Lab, items: list[Item], same: Any) -> None:
    same(lab, together(items, threads=threads))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_share_a_long_context(threads: int, lab: Lab, item_of: Any, same: Any) -> None:
    """Alone, its chunks of keys are spread over threads; in company each thread has a sequence of its own."""
    long = [item_of(lab, length, length, 6) for length in (480, 300, 256)]
    for chosen in (long[:1], long):
        same(lab, together(chosen, threads=threads))


def test_a_new_process_with_two_threads(checkpoints: Any, labs: Any) -> None:
    lab = labs("Qwen2")
    found = elsewhere(checkpoints("Qwen2"), threads=2)
    assert found["pid"] != os.getpid()
    assert found["digest"] == digest_here(lab, make_items(16, vocab_size=lab.vocab_size, longest=400, output_tokens=12))
    assert found["fingerprint"] == lab.certificate.fingerprint


@pytest.mark.parametrize("isa", supported_variants())
def test_every_instruction_set(isa: str, checkpoints: Any, labs: Any) -> None:
    lab = labs("Qwen3")
    found = elsewhere(checkpoints("Qwen3"), isa=isa)
    assert found["variants"] == [isa]
    assert found["digest"] == digest_here(lab, make_items(16, vocab_size=lab.vocab_size, longest=400, output_tokens=12))
    assert found["fingerprint"] == lab.certificate.fingerprint
    assert any(f"TOKENSPEED_AOK_ISA={isa}" in note for note in found["notes"])


def test_instruction_set_of_torch(checkpoints: Any, labs: Any) -> None:
    """What torch itself computes between the operators does not depend on its code paths."""
    lab = labs("Llama")
    found = elsewhere(checkpoints("Llama"), threads=2, ATEN_CPU_CAPABILITY="default", MKL_ENABLE_INSTRUCTIONS="AVX")
    assert found["digest"] == digest_here(lab, make_items(16, vocab_size=lab.vocab_size, longest=400, output_tokens=12))
    assert found["fingerprint"] == lab.certificate.fingerprint


def test_an_instruction_set_that_is_not_there_is_refused(checkpoints: Any) -> None:
    with pytest.raises(AssertionError, match="TOKENSPEED_AOK_ISA='avx9000'"):
        elsewhere(checkpoints("Qwen3"), isa="avx9000")
