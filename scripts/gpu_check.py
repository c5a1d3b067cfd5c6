#!/usr/bin/env python3
"""Check and measure this project on one CUDA GPU: one command, one table, under eight minutes.

    python scripts/gpu_check.py [--json gpu_check.json] [--budget-seconds 460] [--model DIR]

In order: the tests of `tests/gpu` (every Triton kernel, recorded steps = eager ones; a process for each file, since
most of their time is compiling), the conformance kit on every Triton kernel, the bits of this GPU against those of the
emulated one, projections against cuBLAS, attention against torch's SDPA and, where it is installed, flashinfer, then
the engine on a random model of Qwen3-0.6B's shape: tokens per second under auto and rl-bitwise, with recorded decode
steps and without, the share of bandwidth at batch 1, and `numerics verify --quick`. Every part has a share of the time;
a row that could not be measured stays blank and says why, and a target stands beside it without being claimed. The JSON
is written after every row, so that a check which is cut short leaves what it had, and holds the end of what failed
commands said.

Exit status: 0 when all tests and the kit passed, 1 when some failed or a part did not end, 2 without a GPU. Targets are
reported, not enforced.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests/gpu"
KIT_TESTS = "test_triton_kit.py"
AT_ONCE = 12
"""Processes that share the GPU and the CPUs while they compile."""

BUDGET_SECONDS = 460
TESTS_SECONDS, KIT_SECONDS, RUN_SECONDS = 150, 90, 60
"""Most that the tests, the kit and each run of the engine may take of it; `numerics verify` gets what is left."""
OUTPUT_KEPT = 6000
"""Characters of a failed command's output that the JSON keeps."""
NOT_PASSED, BROKE_OFF = "failed, errors or skipped", "broke off"
PAGE = 16

# (K, N) of projections: QKV, output and gate/up of Qwen3-0.6B and of Llama-3-8B, and a vocabulary of 151,936.
PROJECTIONS = ((1024, 4096), (2048, 1024), (1024, 6144), (4096, 6144), (4096, 4096), (4096, 28672), (1024, 151_936))
ROWS = (1, 16, 256, 4096)

# (name, sequences, queries of each, keys of each), with 32 query heads, 8 kv heads and 128 features.
ATTENTION = (
    ("decode 64 x 2048", 64, 1, 2048),
    ("decode 1 x 32768", 1, 1, 32_768),
    ("prefill 1 x 4096", 1, 4096, 4096),
    ("chunk 512 of 8192", 1, 512, 8192),
)


@dataclass
class Row:
    """One line of the table. `value` is None where nothing was measured; `note` then says why.

    `output` is the end of what a command said that failed, for the JSON.
    """

    group: str
    name: str
    value: float | None = None
    unit: str = ""
    target: str = ""
    note: str = ""
    output: str = ""


class Clock:
    """What is left of the time that the whole check may take."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds; never below 1, so that it can serve as a timeout."""
        return max(self.end - time.monotonic(), 1.0)

    def spent(self) -> bool:
        """Whether nothing should be started any more."""
        return time.monotonic() >= self.end


def render(rows: list[Row]) -> str:
    """The table as text; what was not measured is blank."""
    cells = [("", "", "value", "unit", "target", "note")]
    cells += [(r.group, r.name, "" if r.value is None else f"{r.value:,.3f}", r.unit, r.target, r.note) for r in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    lines = []
    for line in cells:
        group, name, value, unit, target, note = line
        fixed = (group.ljust(widths[0]), name.ljust(widths[1]), value.rjust(widths[2]))
        lines.append("  ".join((*fixed, unit.ljust(widths[3]), target.ljust(widths[4]), note)).rstrip())
    return "\n".join(lines)


def run(command: list[str], timeout: float) -> tuple[int, str]:
    """Exit status and output of a command run in the repository's root; 124 when it took too long."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return 124, f"took longer than {timeout:.0f} s"
    return done.returncode, done.stdout + done.stderr


def last_line(text: str) -> str:
    """The last line that says something, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def conformance(clock: Clock, files: Sequence[Path]) -> Iterator[Row]:
    """The tests of these files, all at once: how many passed, and how many did not."""
    part = Clock(min(clock.left(), TESTS_SECONDS))

    def test(file: Path) -> list[Row]:
        status, output = run([sys.executable, "-m", "pytest", "-q", str(file)], part.left())
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", output)}
        bad = sum(counts.get(word, 0) for word in ("failed", "error", "skipped"))
        note, end = ("", "") if status == 0 else (last_line(output), output[-OUTPUT_KEPT:])
        passed = float(counts["passed"]) if "passed" in counts else None
        unfinished = status not in (0, 1)
        return [
            Row("tests/gpu", f"{file.stem}: passed", passed, "tests", "all", note, end),
            Row("tests/gpu", f"{file.stem}: {NOT_PASSED}", None if unfinished else float(bad), "tests", "0", note),
        ]

    with ThreadPoolExecutor(AT_ONCE) as executor:
        for rows in executor.map(test, files):
            yield from rows


def gpu_tests() -> list[Path]:
    """The files of `tests/gpu` but for the kit, which has a part of its own."""
    return sorted(file for file in TESTS.glob("test_*.py") if file.name != KIT_TESTS)


def kit(clock: Clock, kernels: Sequence[str]) -> Iterator[Row]:
    """The conformance kit on each kernel, several at a time: nearly all of it is compiling, which the CPUs do."""
    part = Clock(min(clock.left(), KIT_SECONDS))

    def verify(kernel: str) -> Row:
        command = [sys.executable, "-m", "tokenspeed", "kernels", "verify", "--kernel", kernel, "--device", "cuda"]
        started = time.monotonic()
        status, output = run([*command, "--faults", tempfile.mkdtemp()], part.left())
        seconds = f"{time.monotonic() - started:.0f} s"
        value = {0: 1.0, 1: 0.0}.get(status)
        if status == 0:
            return Row("kit", kernel, value, "", "1", seconds)
        return Row("kit", kernel, value, "", "1", last_line(output), output[-OUTPUT_KEPT:])

    with ThreadPoolExecutor(AT_ONCE) as executor:
        yield from executor.map(verify, kernels)


def kernels_here() -> list[str]:
    """Names of the Triton kernels that this GPU may run."""
    import torch

    from tokenspeed_kernels_aok.triton.launch import arch_of
    from tokenspeed_kernels_aok.triton.specs import triton_specs

    arch = arch_of(torch.device("cuda", torch.cuda.current_device()))
    return [spec.name for spec in triton_specs() if arch in spec.machine.arch]


def milliseconds(call: Callable[[], object], *, recorded: bool = True) -> float:
    """Median time of `call` with a cold L2 cache; `recorded` in a CUDA graph, so that what the host does is no part.

    Without it the host has the time that clearing the cache takes; enough for calls that launch a kernel or two.
    """
    import torch
    import triton.testing

    if recorded:
        call()  # compiles, which may not happen in a recording
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    return float(triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median"))


def bandwidth_gb_per_s() -> float:
    """What this GPU reads and writes in a second when it copies 2 GiB."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.int16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6


def projections(clock: Clock, peak: float) -> Iterator[Row]:
    """`gemm.linear` in bf16 against cuBLAS, and against the bandwidth where few rows make memory the limit."""
    import torch

    from tokenspeed_kernels_aok.triton import gemm

    for k, n in PROJECTIONS:
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        for m in ROWS:
            name = f"{m} x {k} x {n}"
            if clock.spent():
                yield Row("gemm", name, note="out of time")
                continue
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            ours = milliseconds(partial(gemm.linear, x, weight))
            cublas = milliseconds(partial(torch.nn.functional.linear, x, weight))
            flops = 2 * m * k * n / ours / 1e9
            yield Row("gemm", f"{name} / cuBLAS", cublas / ours, "x", ">= 0.9" if m >= 256 else "", f"{flops:.0f} TF/s")
            if m <= 16:
                share = weight.nbytes / ours / 1e6 / peak
                yield Row("gemm", f"{name} bandwidth", 100 * share, "%", ">= 85", f"{ours * 1e3:.1f} us")


def predicted(clock: Clock) -> Iterator[Row]:
    """Share of a projection's bf16 outputs that have the bits of the measured model of this GPU's matrix unit.

    No promise rests on it: it says whether the emulated GPU of the tests computes what this one does.
    """
    import torch

    from tokenspeed_kernels_aok.triton import gemm

    sys.path.insert(0, str(ROOT / "tests/numerics"))
    matrix = importlib.import_module("ptx_emulator.matrix")
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    if clock.spent() or arch not in matrix.UNITS:
        yield Row("emulator", "predicted bits", note="out of time" if clock.spent() else "no model of this GPU")
        return
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 512, generator=generator).bfloat16() for rows in (64, 128))
    expected = matrix.project(arch, x.float().numpy(), weight.float().numpy(), "bf16")
    equal = gemm.linear(x.cuda(), weight.cuda()).cpu() == torch.from_numpy(expected).bfloat16()
    yield Row("emulator", "predicted bits", 100 * equal.double().mean().item(), "%", "")


def attentions(clock: Clock) -> Iterator[Row]:
    """`attention.paged` in bf16 against SDPA over contiguous keys, and against flashinfer over the same pages."""
    import torch

    from tokenspeed_kernels_aok.triton import attention

    heads, kv_heads, size = 32, 8, 128
    for name, sequences, queries, keys in ATTENTION:
        if clock.spent():
            yield Row("attention", name, note="out of time")
            continue
        pages = sequences * keys // PAGE
        q = torch.randn(sequences * queries, heads, size, device="cuda", dtype=torch.bfloat16)
        k_cache, v_cache = torch.randn(2, pages, PAGE, kv_heads, size, device="cuda", dtype=torch.bfloat16)
        tables = torch.randperm(pages, device="cuda").int().view(sequences, -1)
        starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * queries
        lengths = torch.full((sequences,), keys, device="cuda", dtype=torch.int32)
        scale = size**-0.5
        ours = milliseconds(partial(attention.paged, q, k_cache, v_cache, starts, lengths, tables, scale))
        sdpa = milliseconds(_sdpa_call(q.view(sequences, queries, heads, size), keys, kv_heads), recorded=False)
        yield Row("attention", f"{name} / SDPA", sdpa / ours, "x", "", f"{ours * 1e3:.1f} us")
        try:
            call = _flashinfer_call(q, k_cache, v_cache, starts, tables, keys)
            flash = milliseconds(call, recorded=False)
        except Exception as error:
            yield Row(
                "attention", f"{name} / flashinfer", None, "x", ">= 0.8", f"{type(error).__name__}: {error}"[:100]
            )
        else:
            yield Row("attention", f"{name} / flashinfer", flash / ours, "x", ">= 0.8")


def _sdpa_call(q: Any, keys: int, kv_heads: int) -> Callable[[], Any]:
    import torch

    sequences, queries, _, size = q.shape
    k, v = torch.randn(2, sequences, kv_heads, keys, size, device="cuda", dtype=q.dtype)
    mask = None
    if 1 < queries < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(keys - queries)
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, is_causal=queries == keys, enable_gqa=True
    )


def _flashinfer_call(q: Any, k_cache: Any, v_cache: Any, starts: Any, tables: Any, keys: int) -> Callable[[], Any]:
    """flashinfer over the same pages; planning is outside of the measured call, as an engine plans once a step."""
    import flashinfer
    import torch

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    page_starts = torch.arange(len(tables) + 1, device="cuda", dtype=torch.int32) * tables.shape[1]
    last = torch.full((len(tables),), (keys - 1) % PAGE + 1, device="cuda", dtype=torch.int32)
    heads, kv_heads, size = q.shape[1], k_cache.shape[2], q.shape[2]
    if len(q) == len(tables):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(page_starts, tables.flatten(), last, heads, kv_heads, size, PAGE, q_data_type=q.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            starts, page_starts, tables.flatten(), last, heads, kv_heads, size, PAGE, causal=True, q_data_type=q.dtype
        )
    return lambda: wrapper.run(q, (k_cache, v_cache))


def sampling(clock: Clock) -> Iterator[Row]:
    """Time of sampling 64 rows of a vocabulary of 151,936, with and without filters."""
    import torch

    from tokenspeed_kernels_aok.triton import sample

    rows = 64
    logits = torch.randn(rows, 151_936, device="cuda", dtype=torch.bfloat16) * 3
    ones, zeros = torch.ones(rows, device="cuda"), torch.zeros(rows, device="cuda")
    seeds = torch.arange(rows, device="cuda")
    for name, top_k, top_p in (("no filter", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9)):
        if clock.spent():
            yield Row("sampling", name, note="out of time")
            continue
        arguments = (logits, ones, zeros.int() + top_k, ones * top_p, zeros, seeds, seeds)
        yield Row("sampling", f"64 rows, {name}", milliseconds(partial(sample.sample, *arguments)) * 1e3, "us")


RUNS = {
    "auto": ("--numerics", "auto"),
    "rl-bitwise": ("--numerics", "rl-bitwise"),
    "rl-bitwise, not recorded": ("--numerics", "rl-bitwise", "--no-decode-graphs"),
}
"""Ways to run the engine, and their options."""


def engine(clock: Clock, model: Path, peak: float) -> Iterator[Row]:
    """Speed of every way to run, then `numerics verify`. Blank where the engine does not run on CUDA."""
    rates: dict[str, dict[int, float]] = {}
    for name, options in RUNS.items():
        command = [sys.executable, "-m", "tokenspeed", "bench", "throughput", str(model), "--json", "--device", "cuda"]
        command += [*options, "--batch-size", "1", "--batch-size", "64", "--repeat", "2"]
        status, output = run(command, min(clock.left(), RUN_SECONDS))
        note, end = ("", "") if status == 0 else (last_line(output), output[-OUTPUT_KEPT:])
        if status == 0:
            rates[name] = decode_rates(output)
        for batch in (1, 64):
            yield Row("engine", f"{name}, batch {batch}", rates.get(name, {}).get(batch), "tokens/s", "", note, end)
    yield Row("engine", "rl-bitwise / auto, batch 64", _ratio(rates, "rl-bitwise", "auto", 64), "x", ">= 0.9")
    for batch in (1, 64):
        ratio = _ratio(rates, "rl-bitwise", "rl-bitwise, not recorded", batch)
        yield Row("engine", f"recorded / not recorded, batch {batch}", ratio, "x")
    share = None
    if 1 in rates.get("rl-bitwise", {}):
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        share = 100 * weights * rates["rl-bitwise"][1] / 1e9 / peak
    yield Row("engine", "rl-bitwise, batch 1, share of bandwidth", share, "%")
    command = [sys.executable, "-m", "tokenspeed", "numerics", "verify", str(model), "--quick", "--device", "cuda"]
    status, output = run(command, clock.left())
    value = {0: 1.0, 1: 0.0}.get(status)
    end = "" if status == 0 else output[-OUTPUT_KEPT:]
    yield Row("engine", "numerics verify --quick", value, "", "1", last_line(output), end)


def decode_rates(output: str) -> dict[int, float]:
    """Tokens per second by batch size, from what `bench throughput --json` printed; warnings may stand around it."""
    _, brace, rest = f"\n{output}".partition("\n{")
    result, _ = json.JSONDecoder().raw_decode(brace.strip() + rest)
    return {row["batch"]: row["decode_tokens_per_second"] for row in result["decode"]}


def _ratio(rates: dict[str, dict[int, float]], above: str, below: str, batch: int) -> float | None:
    """Of two rates, where both were measured."""
    if batch in rates.get(above, {}) and batch in rates.get(below, {}):
        return rates[above][batch] / rates[below][batch]
    return None


def write_random_model(folder: Path) -> None:
    """A checkpoint of Qwen3-0.6B's shape with random weights and the tokenizer of the embedded model."""
    import torch
    from safetensors.torch import save_file

    tiny = ROOT / "tokenspeed-models/src/tokenspeed_models/tiny"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    hidden, feed_forward, layers, heads, kv_heads, head_dim, vocabulary = 1024, 3072, 28, 16, 8, 128, 151_936
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def matrix(n: int, k: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(n, k, generator=generator) * k**-0.5
        return values.to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{prefix}.self_attn.q_norm.weight": torch.ones(head_dim),
            f"{prefix}.self_attn.k_norm.weight": torch.ones(head_dim),
            f"{prefix}.mlp.gate_proj.weight": matrix(feed_forward, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(feed_forward, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, feed_forward),
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, folder / "model.safetensors")


def describe_gpu() -> dict[str, str]:
    """What the numbers belong to."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    versions = {}
    for name in ("torch", "triton", "flashinfer-python", "tokenspeed", "tokenspeed-kernels-aok"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"gpu": properties.name, "multiprocessors": str(properties.multi_processor_count), **versions}


def measure(clock: Clock, model: Path | None) -> Iterator[Row]:
    """Every row, in order; a part that breaks off does not take the others with it."""
    import torch

    yield from guarded("tests/gpu", conformance(clock, gpu_tests()))
    yield from guarded("kit", kit(clock, kernels_here()))
    yield from guarded("emulator", predicted(clock))
    peak = bandwidth_gb_per_s()
    yield Row("memory", "copy", peak, "GB/s")
    yield from guarded("gemm", projections(clock, peak))
    yield from guarded("attention", attentions(clock))
    yield from guarded("sampling", sampling(clock))
    torch.cuda.empty_cache()  # the engines are sized by what they find free
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            write_random_model(Path(folder))
        yield from guarded("engine", engine(clock, model or Path(folder), peak))


def guarded(group: str, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of a part. An error ends it, and is its last row."""
    try:
        yield from rows
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        yield Row(group, BROKE_OFF, note=last_line(text), output=text[:OUTPUT_KEPT])


def main() -> int:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="default: %(default)s")
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS, help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="checkpoint to run the engine on; default: random weights")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA GPU here: nothing was checked and nothing was measured", file=sys.stderr)
        return 2
    started = time.monotonic()
    gpu = describe_gpu()
    rows: list[Row] = []
    for row in measure(Clock(arguments.budget_seconds), arguments.model):
        rows.append(row)
        seconds = round(time.monotonic() - started, 1)
        result = {**gpu, "seconds": seconds, "rows": [asdict(each) for each in rows]}
        arguments.json.write_text(json.dumps(result, indent=1))
        print(f"{seconds:6.1f} s  {row.group}  {row.name}  {row.note}", file=sys.stderr, flush=True)
    print("  ".join(f"{name} {value}" for name, value in gpu.items()))
    print(render(rows))
    print(f"{seconds} s; written to {arguments.json}")
    return 0 if all_held(rows) else 1


def all_held(rows: list[Row]) -> bool:
    """Whether no test failed or was left out, every kernel passed the kit, and the engine its verification."""
    for row in rows:
        checked = row.group in ("tests/gpu", "kit") or row.name in ("numerics verify --quick", BROKE_OFF)
        if checked and (row.value is None or (row.value != 0 if row.name.endswith(NOT_PASSED) else row.value == 0)):
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
