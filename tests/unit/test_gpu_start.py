"""A start on a GPU as far as it goes without one: what is planned, what is set, and what is refused in which words."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tokenspeed import LLM, startup
from tokenspeed.cli.main import cli
from tokenspeed.config_sources import load_config
from tokenspeed.engine.buckets import Bucket, plan_recording
from tokenspeed.engine.device import CpuDevice
from tokenspeed.errors import CheckpointError, ConfigError, StartRefused
from tokenspeed.kernels.spec import CUDA_GRAPH, KernelSpec, Need
from tokenspeed.machine import Machine, choose_device, named_machine, read_machine
from tokenspeed.numerics.plan import Plan
from tokenspeed.numerics.resolve import ResolvedNumerics, resolve
from tokenspeed.numerics.settings import GpuSettings, gpu_settings
from tokenspeed.sizing import Footprint, Sizes, choose_sizes
from tokenspeed.startup import launching

GIB = 1 << 30
H200 = replace(named_machine("sm90"), gpu_memory_bytes=141 * GIB, gpu_free_bytes=140 * GIB)
PAGE = 1 << 20


def config(**options: Any) -> Any:
    return load_config({"numerics": "rl-bitwise", **options}, environ={})


def numerics(envelope: str, **given: str) -> ResolvedNumerics:
    return resolve(envelope, None, given, device="cuda").numerics


def test_the_plan_for_a_gpu_records_decode_steps_and_goes_ahead() -> None:
    options = startup.engine_options(startup.prepare(config(max_num_seqs=20), H200))
    assert options.ahead
    assert options.device == "cuda"
    assert options.decode_buckets[0] == Bucket(20, 128)
    assert options.decode_buckets[-1] == Bucket(1, 64)
    on_cpu = startup.engine_options(startup.prepare(config(), named_machine("cpu-avx2")))
    assert (on_cpu.ahead, on_cpu.decode_buckets) == (False, ())


def test_recording_can_be_switched_off_and_changes_no_fingerprint() -> None:
    with_graphs = startup.prepare(config(), H200)
    without = startup.prepare(config(decode_graphs=False), H200)
    assert without.recording.buckets == ()
    assert "--no-decode-graphs was given" in " ".join(without.plan.notes)
    assert without.plan.digest == with_graphs.plan.digest


def test_a_kernel_that_cannot_be_recorded_is_named() -> None:
    fit = KernelSpec("fit", "gemm.linear", "a", "m:f", (), features=frozenset({CUDA_GRAPH}))
    unfit = KernelSpec("unfit", "norm.rms", "a", "m:f", ())
    scores = KernelSpec("scores", "sampling.logprobs", "a", "m:f", ())
    sizes: dict[str, Any] = {"wanted": True, "max_num_seqs": 2, "max_model_len": 100}
    assert plan_recording("cuda", [fit, scores], **sizes).buckets == (Bucket(2, 7), Bucket(1, 7))
    refused = plan_recording("cuda", [fit, unfit], **sizes)
    assert refused.describe() == ("decode steps are not recorded as CUDA graphs: unfit does not declare cuda_graph")
    assert plan_recording("cpu", [fit], **sizes).reason == "the device is cpu"


def sizes(machine: Machine, footprint: Footprint, **options: object) -> tuple[Sizes, list[str]]:
    found, problems = choose_sizes(
        load_config(options, environ={}), machine, max_positions=4096, bytes_per_page=PAGE, footprint=footprint
    )
    return found, [problem.render() for problem in problems]


def test_the_cache_gets_what_the_gpu_has_left() -> None:
    found, problems = sizes(H200, Footprint(weights=16 * GIB, step=2 * GIB), max_num_seqs=1000)
    assert problems == []
    assert found.num_pages * PAGE == (140 * GIB - int(141 * GIB * 0.08) - 34 * GIB) // PAGE * PAGE
    assert sizes(H200, Footprint(weights=GIB), max_num_seqs=3)[0].num_pages == 3 * 256


def test_a_gpu_that_is_too_small_is_refused_in_numbers() -> None:
    assert sizes(H200, Footprint(weights=150 * GIB, step=2 * GIB))[1] == [
        "[memory] the GPU has 140.00 GiB free of 141.00 GiB, which is too little\n"
        "    weights 150.00 GiB\n"
        "    a step of the largest size, estimated: 2.00 GiB\n"
        "    KV cache of 1 pages: 0.00 GiB\n"
        "    kept empty: 11.28 GiB\n"
        "    -> free memory, or give a smaller --kv-cache-memory, --max-num-batched-tokens or --max-num-seqs"
    ]
    assert "KV cache of 153600 pages: 150.00 GiB" in sizes(H200, Footprint(), kv_cache_memory=150 * GIB)[1][0]
    # The place of a second set of weights may be given away.
    assert sizes(H200, Footprint(weights=50 * GIB), kv_cache_memory=70 * GIB)[1] == []


def test_a_footprint_counts_the_widest_projection_and_the_logits() -> None:
    needs = [Need.of("gemm.linear", dtypes={}, facts={"k": 100, "n": n}) for n in (50, 300, 1000)]
    found = Footprint.of(7, needs, tokens=10, rows=4, vocabulary=1000)
    assert found == Footprint(7, 10 * 2 * 400 * 4 + 4 * 1000 * 8 + (64 << 20))


def test_settings_follow_the_switches() -> None:
    tight, problems = gpu_settings(numerics("rl-bitwise"), "cuda", {})
    assert problems == ()
    assert tight.precision == "highest"
    assert tight.environment == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }
    assert (
        gpu_settings(numerics("rl-bitwise"), "cuda", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})[0].environment[
            "CUBLAS_WORKSPACE_CONFIG"
        ]
        == ":16:8"
    )
    assert gpu_settings(numerics("auto"), "cuda", {"NCCL_ALGO": "Tree"}) == (GpuSettings(), ())
    assert gpu_settings(numerics("rl-bitwise"), "cpu", {"NCCL_ALGO": "Tree"}) == (GpuSettings(), ())
    alone = gpu_settings(numerics("auto", collectives="ordered"), "cuda", {})[0]
    assert (alone.precision, set(alone.environment)) == ("high", {"NCCL_ALGO", "NCCL_PROTO"})


def test_a_process_that_used_the_gpu_is_told_what_changes_for_it() -> None:
    """A trainer beside the engine computes with the same settings; what libraries have read they do not read again."""
    tight = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    notes = {
        (precision, given): gpu_settings(numerics("rl-bitwise"), "cuda", tight if given else {}, precision)[0].note
        for precision in ("", "high", "highest")
        for given in (False, True)
    }
    assert notes["high", False] == (
        "this process used the GPU before; everything in it now has torch's precision of fp32 products highest "
        "(it was high), CUBLAS_WORKSPACE_CONFIG=:4096:8, NCCL_ALGO=Ring, NCCL_PROTO=Simple; a library that runs "
        "already does not read CUBLAS_WORKSPACE_CONFIG, NCCL_ALGO, NCCL_PROTO again"
    )
    assert notes["high", True].endswith("highest (it was high)")
    assert "fp32" not in notes["highest", False]
    assert {notes["", False], notes["", True], notes["highest", True]} == {""}
    assert "high (it was highest)" in gpu_settings(numerics("auto"), "cuda", {}, "highest")[0].note


def test_the_note_is_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    plan = startup.prepare(config(), H200).plan
    assert any("products highest (it was medium)" in note for note in plan.notes)

    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert any("(it was mixed)" in note for note in startup.prepare(config(), H200).plan.notes)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not any("used the GPU" in note for note in startup.prepare(config(), H200).plan.notes)


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("NCCL_ALGO", "Tree", "--collectives ordered needs Ring"),
        ("NCCL_PROTO", "LL", "--collectives ordered needs Simple"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "--kernel-features batch_invariant needs :4096:8 or :16:8"),
        ("NVIDIA_TF32_OVERRIDE", "1", "--no-tf32 needs 0"),
    ],
)
def test_a_variable_that_says_the_opposite_is_refused_and_not_overwritten(
    name: str, value: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartRefused) as refused:
        startup.prepare(config(), H200)
    assert str(refused.value) == f"[environment] {name}={value} is set, and {needed}\n    -> unset {name}"


def test_without_a_gpu_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"--device cuda: .*; use --device cpu"):
        read_machine("cuda")
    result = CliRunner().invoke(cli, ["generate", "tiny", "--device", "cuda"])
    assert result.exit_code == 2
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='' hides every GPU"):
        read_machine("cuda")


def test_a_full_gpu_refuses_the_start_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        held = torch.zeros(1000)
        allocated.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. 1 GiB is free")

    allocated: list[weakref.ref[torch.Tensor]] = []
    prepared = startup.prepare(config(), named_machine("cpu-avx2"))
    monkeypatch.setattr(launching, "_import_kernels", full)
    with pytest.raises(StartRefused) as refused:
        startup.launch(prepared)
    assert str(refused.value).splitlines()[:4] == [
        "[memory] CUDA out of memory",
        "    Tried to allocate 2 GiB",
        "    1 GiB is free",
        f"    {prepared.sizes.num_pages} pages of KV cache were planned",
    ]
    assert refused.value.__context__ is None
    assert allocated[0]() is None


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_a_full_host_refuses_the_start(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def full(*_: object) -> None:
        raise kind("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 24 bytes")

    prepared = startup.prepare(config(), named_machine("cpu-avx2"))
    monkeypatch.setattr(launching, "_import_kernels", full)
    with pytest.raises(StartRefused, match="can't allocate memory: you tried to allocate 24 bytes"):
        startup.launch(prepared)


def test_another_error_of_a_start_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("something else")

    prepared = startup.prepare(config(), named_machine("cpu-avx2"))
    monkeypatch.setattr(launching, "_import_kernels", broken)
    with pytest.raises(RuntimeError, match="something else"):
        startup.launch(prepared)


def test_a_start_asks_the_kernels_for_the_sizes_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "row_counts", lambda _, most: (1, 65, most))
    engine = startup.start(config(max_num_batched_tokens=100, max_num_seqs=2))
    assert engine.options.warm_up_tokens == (1, 65, 100)


def test_no_memory_for_new_weights_keeps_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = startup.start(config())

    allocated: list[weakref.ref[torch.Tensor]] = []
    found: list[object] = []

    def full(_source: object) -> None:
        held = torch.zeros(1000)
        allocated.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def reclaim(_: CpuDevice) -> str:
        found.append(allocated[0]())
        return "told"

    monkeypatch.setattr(engine._staging, "from_source", full)
    monkeypatch.setattr(CpuDevice, "reclaim", reclaim)
    reason = "no memory for new weights beside the old ones: CUDA out of memory; told; start with"
    with pytest.raises(CheckpointError, match=reason) as refused:
        engine.stage_weights("somewhere")
    assert found == [None]
    assert refused.value.__context__ is None
    assert not engine.has_work


def test_what_torch_keeps_and_nothing_holds_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second engine of a process would find a GPU that is full of the first one's cache."""
    for name, value in {
        "is_available": True,
        "get_device_capability": (9, 0),
        "get_device_name": "H200",
        "mem_get_info": (10 * GIB, 141 * GIB),
        "memory_reserved": 120 * GIB,
        "memory_allocated": 2 * GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    machine = read_machine("cuda")
    assert (machine.arch, machine.gpu_memory_bytes, machine.gpu_free_bytes) == ("sm90", 141 * GIB, 128 * GIB)


def test_a_gpu_is_read_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's model may be on another GPU than the current one, and of another kind."""
    for name, values in {
        "is_available": {None: True},
        "get_device_capability": {None: (9, 0), 1: (8, 0)},
        "get_device_name": {None: "H200", 1: "A100"},
        "mem_get_info": {None: (10, 141), 1: (20, 80)},
        "memory_reserved": {None: 5, 1: 7},
        "memory_allocated": {None: 4, 1: 4},
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda index=None, values=values: values[index])
    for device, expected in (("cuda", ("sm90", "H200", 11)), ("cuda:1", ("sm80", "A100", 23))):
        machine = read_machine(device)
        assert (machine.device, machine.arch, machine.name, machine.gpu_free_bytes) == ("cuda", *expected)


def test_closing_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[bool] = []
    llm = LLM("tiny", max_num_seqs=2)
    cache = weakref.ref(llm.engine.cache_tensors()[0])
    monkeypatch.setattr(CpuDevice, "reclaim", lambda _: gone.append(cache() is None))
    llm.close()
    llm.close()
    assert gone == [True]
