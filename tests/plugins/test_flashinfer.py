"""The flashinfer distribution without flashinfer: specs, verdicts, and the adapters over a stand-in in plain torch."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import check_flashinfer_calls
from tokenspeed import BATCH_INVARIANT, KernelSpec, MachineRequirement
from tokenspeed.kernels.reference import activation, attention, norm, rope
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import select
from tokenspeed.kernels.spec import Need
from tokenspeed.machine import Machine, read_machine
from tokenspeed.testing.verify import verify_kernel
from tokenspeed_kernels_flashinfer.specs import SPECS

HOPPER = Machine("cuda", "sm90", libraries={"torch": "2", "flashinfer": "0.7"})


class Prefill:
    """`BatchPrefillWithPagedKVCacheWrapper`: the part that the adapter uses, by the reference."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool,
    ) -> None:
        assert causal
        assert page_size == 16
        for indices in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert indices.dtype == torch.int32
        pages = paged_kv_indptr.diff()
        tables = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for b, count in enumerate(pages.tolist()):
            tables[b, :count] = paged_kv_indices[paged_kv_indptr[b] : paged_kv_indptr[b] + count]
        lengths = (pages - 1) * page_size + paged_kv_last_page_len
        self.arguments = qo_indptr, lengths, tables, sm_scale, window_left + 1
        self.dtypes = q_data_type, kv_data_type

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert (q.dtype, paged_kv_cache[0].dtype) == self.dtypes
        assert q.is_contiguous()
        assert len(q) == int(self.arguments[0][-1])
        return attention.paged(q, *paged_kv_cache, *self.arguments)


def _dense(*tensors: torch.Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors)


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    _dense(x)
    assert x.dim() == 2
    return norm.rms(x, weight, eps)


def _fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    _dense(x, residual)
    out, total = norm.add_rms(x, residual, weight, eps)
    x.copy_(out)
    residual.copy_(total)


def _rope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert query.dim() == key.dim() == 2
    q, k = (x.view(len(x), -1, head_size) for x in (query, key))
    return tuple(x.flatten(1) for x in rope.apply(q, k, positions, cos_sin_cache, not is_neox))  # type: ignore[return-value]


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    _dense(x)
    assert x.shape[1] // 2 * x.element_size() % 16 == 0
    return activation.silu_and_mul(x)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `flashinfer` whose functions do what the real ones document, on the CPU."""
    module: Any = ModuleType("flashinfer")
    module.rmsnorm, module.fused_add_rmsnorm = _rmsnorm, _fused_add_rmsnorm
    module.apply_rope_with_cos_sin_cache, module.silu_and_mul = _rope, _silu_and_mul
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    yield
    for name in ("rows", "attention"):
        sys.modules.pop(f"tokenspeed_kernels_flashinfer.{name}", None)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_adapter_passes_the_kit_over_the_stand_in(spec: KernelSpec, stand_in: None) -> None:
    here = replace(spec, machine=MachineRequirement(device="cpu"), traits={**spec.traits, "head_dim": frozenset({64})})
    report = verify_kernel(here, read_machine())
    assert not [result.as_dict() for result in report.failures]


def test_nothing_promises_bits() -> None:
    assert not [spec.name for spec in SPECS if BATCH_INVARIANT in spec.features or spec.bit_order]


def test_on_a_gpu_it_is_preferred_under_auto() -> None:
    need = Need.of("norm.rms", dtypes={"x": "bfloat16", "weight": "bfloat16"}, facts={"hidden": 4096})
    selection = select([need], KernelRegistry(SPECS), HOPPER)
    assert selection.choices[need].name == "flashinfer.norm.rms"


@pytest.mark.parametrize(
    ("machine", "facts", "reason"),
    [
        (Machine("cpu"), {}, "needs device cuda"),
        (Machine("cuda", "sm70", libraries={"flashinfer": "1"}), {}, "needs arch"),
        (Machine("cuda", "sm90"), {}, "needs flashinfer, which is not installed"),
        (HOPPER, {"head_dim": 80}, "head_dim is 80, and it supports only"),
    ],
)
def test_what_is_missing_is_a_verdict(machine: Machine, facts: dict[str, int], reason: str) -> None:
    need = Need.of("attention.paged", dtypes={"x": "bfloat16", "kv": "bfloat16"}, facts=facts)
    verdicts = select([need], KernelRegistry(SPECS), machine).verdicts[need]
    assert len(verdicts) == 2
    assert all(reason in verdict.reason for verdict in verdicts)


def test_without_flashinfer_the_implementation_says_so() -> None:
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        importlib.import_module("tokenspeed_kernels_flashinfer.rows")


def wheel(path: Path, **changes: str) -> Path:
    """A wheel with the signatures that the adapters rely on; `changes` replaces files."""
    files = {
        "__init__": "from .norm import rmsnorm as rmsnorm, fused_add_rmsnorm\nfrom .rope import *\n"
        "from .rope import apply_rope_with_cos_sin_cache\nfrom .act import silu_and_mul\n"
        "from .prefill import BatchPrefillWithPagedKVCacheWrapper\n",
        "norm/__init__": "def rmsnorm(input, weight, eps=1e-6, out=None): ...\n"
        "def fused_add_rmsnorm(input, residual, weight, eps=1e-6): ...\n",
        "rope": "def apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox=True): ...",
        "act": "def silu_and_mul(input, out=None): ...",
        "prefill": "class BatchPrefillWithPagedKVCacheWrapper:\n"
        "    def __init__(self, float_workspace_buffer, kv_layout='NHD'): ...\n"
        "    def plan(self, a, b, c, d, e, f, g, h, causal=False, sm_scale=None, window_left=-1, q_data_type=None,\n"
        "             kv_data_type=None, disable_split_kv=False): ...\n"
        "    def run(self, q, paged_kv_cache, *args, out=None): ...\n",
        **changes,
    }
    with zipfile.ZipFile(path / "flashinfer.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(f"flashinfer/{name}.py", text)
    return path / "flashinfer.whl"


def test_calls_fit_the_signatures(tmp_path: Path) -> None:
    assert {call.target for call in check_flashinfer_calls.calls()} >= {
        "rmsnorm",
        "silu_and_mul",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
    }
    assert check_flashinfer_calls.faults(wheel(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"act": "def silu_and_mul(*, input): ..."}, "silu_and_mul: too many positional"),
        ({"norm/__init__": "def fused_add_rmsnorm(input, residual, weight, eps): ..."}, "exports no rmsnorm"),
        (
            {"prefill": "class BatchPrefillWithPagedKVCacheWrapper:\n    def __init__(self, b, l): ..."},
            "no method plan",
        ),
    ],
)
def test_a_changed_signature_is_noticed(changes: dict[str, str], fault: str, tmp_path: Path) -> None:
    assert any(fault in line for line in check_flashinfer_calls.faults(wheel(tmp_path, **changes)))
