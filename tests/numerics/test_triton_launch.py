"""How the Triton kernels are launched, with kernels and a CUDA that are made up: on which device, in how many forms.

Nothing is compiled here. What Triton would compile for a call is told by the call's arguments: their types, which of
them are constants, and of the others which are 1 and which are multiples of 16.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.kernels.spec import Need
from tokenspeed_kernels_aok import triton as kernels
from tokenspeed_kernels_aok.triton import attention, gemm, launch, logprobs, sample
from tokenspeed_kernels_aok.triton.tiles import GEMM, GEMM_FLOAT32

H200_MULTIPROCESSORS = 132


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The calling thread's current device, in the place of CUDA's."""
    state = {"device": 0, "entered": 0}

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, state["device"] = state["device"], wanted.index
        state["entered"] += 1
        yield
        state["device"] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: state["device"])
    monkeypatch.setattr(torch.cuda, "device", device)
    return state


class Kernel:
    """Notes the device that each launch finds current."""

    def __init__(self, thread: dict[str, int]) -> None:
        self.thread = thread
        self.launches: list[tuple[int, tuple[int, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*_arguments: object, **options: object) -> None:
            assert not options["enable_fp_fusion"]
            self.launches.append((self.thread["device"], grid))

        return run


def test_a_kernel_runs_where_its_operands_are(thread: dict[str, int]) -> None:
    kernel = Kernel(thread)
    for index in (0, 1, 0):
        launch.launch(kernel, (index, 7), torch.device("cuda", index))
        assert thread["device"] == 0
    assert kernel.launches == [(0, (0, 7)), (1, (1, 7)), (0, (0, 7))]
    assert thread["entered"] == 1


def test_nothing_else_launches_a_kernel() -> None:
    """`kernel[grid](...)` is what a launch looks like."""
    found = [
        file.name
        for file in sorted(Path(kernels.__file__).parent.glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    assert found == ["launch.py", "launch.py"]


def form_of(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles code of its own for, as the specialisation of its launcher has it."""
    positional = iter(arguments)
    return (
        kernel.fn.__name__,
        *sorted((name, value) for name, value in constants.items() if name not in kernel.arg_names),
        *(
            constants[parameter.name]
            if parameter.is_constexpr
            else _kind(next(positional), exactly=not parameter.do_not_specialize)
            for parameter in kernel.params
        ),
    )


def _kind(value: Any, *, exactly: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "i32" if abs(value) < 2**31 else "i64", exactly and (value == 1, value % 16 == 0)
    if isinstance(value, float):
        return "fp32"
    return value.base.dtype, tuple(value.block_shape)


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """The forms of whatever is launched from now on."""
    found: set[tuple[Any, ...]] = set()

    def note(kernel: Any, _grid: object, _device: object, *arguments: Any, **constants: Any) -> None:
        found.add(form_of(kernel, arguments, constants))

    monkeypatch.setattr(launch, "arch_of", lambda _: "sm90")
    for family in kernels.families():
        monkeypatch.setattr(family, "launch", note)
        for name, value in {"arch_of": lambda _: "sm90", "multiprocessors": lambda _: H200_MULTIPROCESSORS}.items():
            monkeypatch.setattr(family, name, value, raising=False)
    return found


def step(tokens: int, pages: int, sequences: int, scores: tuple[int, ...] = (1,)) -> None:
    """The operators of a layer and of sampling, called as the layers call them; so many `scores` for each row."""
    heads, kv_heads, size, vocabulary = 6, 2, 64, 1003
    x = torch.zeros(tokens, 576, dtype=torch.bfloat16)
    weights = torch.zeros(640, 576, dtype=torch.bfloat16)
    q, k, v = (
        part.view(tokens, -1, size)
        for part in gemm.linear(x, weights).split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    )
    positions = torch.zeros(tokens, dtype=torch.int64)
    q = kernels.norm.rms(q, torch.zeros(size, dtype=torch.bfloat16), 1e-6)
    q, k = kernels.rope.apply(q, k, positions, torch.zeros(99, size))
    cache = torch.zeros(pages, 16, kv_heads, size, dtype=torch.bfloat16)
    kernels.cache.write(k, v, cache, cache, positions)
    tables = torch.zeros(sequences, pages, dtype=torch.int32)
    starts, lengths = torch.zeros(sequences + 1, dtype=torch.int32), torch.zeros(sequences, dtype=torch.int32)
    attention.paged(q, cache, cache, starts, lengths, tables, 0.125)
    kernels.activation.silu_and_mul(gemm.linear(x, weights))
    kernels.norm.add_rms(x, x, torch.zeros(576, dtype=torch.bfloat16), 1e-6)
    kernels.embedding.lookup(positions, x)
    logits = gemm.linear(x[:sequences], torch.zeros(vocabulary, 576, dtype=torch.bfloat16))
    rows = len(logits)
    fp32, int64 = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
    sample.sample(logits, fp32, int64.int(), fp32, fp32, int64, int64)
    for width in scores:
        logprobs.logprobs(logits, int64.unsqueeze(-1).expand(rows, width).contiguous(), fp32, "megatron", 32768)


def test_what_varies_between_steps_makes_no_form_of_its_own(forms: set[tuple[Any, ...]]) -> None:
    """But the tile of a projection, which a warm-up asks the tile tables about; see `row_counts`."""
    step(1, 64, 1)
    small = set(forms)
    for tokens, pages, sequences in ((2, 64, 1), (16, 70, 16), (17, 65, 3), (33, 80, 32), (1, 128, 1)):
        step(tokens, pages, sequences, scores=(1, 2, 16, 21))
    assert forms == small
    assert len({form[0] for form in forms}) == 14


def test_the_row_counts_of_a_need_meet_every_form_of_its_projection(
    forms: set[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    most = 5000
    for n in (64, 1024, 6144, 1003):
        need = Need.of("gemm.linear", dtypes={"x": "bfloat16", "weight": "bfloat16"}, facts={"k": 64, "n": n})
        weight = torch.zeros(n, 64, dtype=torch.bfloat16)
        x = torch.zeros(most, 64, dtype=torch.bfloat16)
        forms.clear()
        for rows in gemm.row_counts(need, most):
            gemm.linear(x[:rows], weight)
        warm = set(forms)
        for rows in (*range(1, 700, 7), *range(700, most, 53), most):
            gemm.linear(x[:rows], weight)
        assert forms == warm
        assert len(warm) == len(gemm.row_counts(need, most))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("arch", sorted(GEMM))
def test_row_counts_are_where_the_choice_changes(arch: str, groups: int) -> None:
    for table in (GEMM[arch], GEMM_FLOAT32[arch]):
        for n in (5, 64, 640, 4096, 151_936):
            for multiprocessors in (1, 20, 108, 132):
                chosen = [table.choose(m, n, multiprocessors, groups) for m in range(1, 3000)]
                changes = [m for m in range(2, 3000) if chosen[m - 1] != chosen[m - 2]]
                counts = table.row_counts(n, multiprocessors, groups)
                assert [m for m in counts if m < 3000] == [1, *changes]


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_call_takes_a_form_that_is_compiled_ahead_of_time(
    arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the operands' sizes, strides and addresses: what is compiled for them is held to the limits."""
    table = gemm.table_for(arch, dtype)
    listed = {form.name: form for form in gemm.forms(arch)}
    used: set[str] = set()

    def check(kernel: Any, _grid: object, _device: object, *arguments: Any, **constants: Any) -> None:
        names = [p.name for p in kernel.params if not p.is_constexpr]
        values = dict(zip(names, arguments, strict=True))
        descriptors = constants["DESCRIPTORS"]
        kind = "descriptors" if descriptors else "pointers" if values["depth"] % 16 == 0 else "pointers.odd"
        short = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        form = listed[f"gemm.{short}.{tile.block_m}x{tile.columns}.{kind}"]
        used.add(form.name)
        specialised = {p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize}
        for name in specialised:
            if not (descriptors and name in ("x", "weight")):
                value = values[name].data_ptr() if isinstance(values[name], torch.Tensor) else values[name]
                assert (value % 16 == 0) == (name in form.aligned), f"{form.name}: {name} is {value}"
                assert value != 1

    monkeypatch.setattr(gemm, "launch", check)
    for k in (64, 67, 72):
        for n in (1, 5, 64):
            wide = torch.zeros(20, k + 7, dtype=dtype)
            for tile in table.tiles:
                for x in (wide[:, :k], wide[:, 1 : k + 1], wide[:1, :k].expand(9, -1), wide[:1, :k]):
                    weight = torch.zeros(n, k + 3, dtype=dtype)[:, 3:]
                    assert gemm.linear_by(table, tile, x, weight).is_contiguous()
                    grouped = torch.zeros(3, n, k, dtype=dtype)
                    out = gemm.batched_by(table, tile, x.unsqueeze(1).expand(-1, 3, -1), grouped)
                    assert out.is_contiguous()
                    assert out.shape == (len(x), 3, n)
    kinds = {name.rsplit(".", 1)[-1] for name in used}
    assert kinds == ({"pointers", "odd", "descriptors"} if table.descriptors else {"pointers", "odd"})
