"""The flashinfer distribution without flashinfer: specs, verdicts, and the adapters over a stand-in in plain torch."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import check_flashinfer_calls
from tokenspeed import BATCH_INVARIANT, KernelSpec, MachineRequirement
from tokenspeed.kernels.reference import activation, attention, mla, norm, rope
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import select
from tokenspeed.kernels.spec import Need
from tokenspeed.machine import Machine, read_machine
from tokenspeed.testing.verify import verify_kernel
from tokenspeed_kernels_aok.triton.specs import triton_specs
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


class MLAMetadata:
    """`flashinfer.mla.MLAPlanMetadata`."""

    @classmethod
    def csr(cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor):
        assert all(x.dtype == torch.int32 for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        pages = kv_indptr.diff()
        assert torch.equal(pages, (kv_len_arr + 15) // 16)
        tables = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for b, count in enumerate(pages.tolist()):
            tables[b, :count] = kv_indices[kv_indptr[b] : kv_indptr[b] + count]
        return qo_indptr, kv_len_arr, tables


class MLA:
    """`BatchMLAPagedAttentionWrapper`: packed queries [T,Hq,C] over a cache [P,S,C], by the reference."""

    def __init__(self, workspace: torch.Tensor) -> None:
        assert workspace.dtype == torch.uint8

    def plan(self, *, metadata: Any, causal: bool, page_size: int, sm_scale: float, **more: Any) -> None:
        assert causal
        assert page_size == 16
        self.metadata, self.scale, self.more = metadata, sm_scale, more

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        latent, rotated = self.more["head_dim_ckv"], self.more["head_dim_kpe"]
        assert (query.dtype, kv_cache.dtype) == (self.more["q_data_type"], self.more["kv_data_type"])
        assert query.shape[1:] == (self.more["num_heads"], latent + rotated)
        assert kv_cache.shape[1:] == (16, latent + rotated)
        return mla.attention(query, kv_cache.unsqueeze(2), *self.metadata, self.scale, latent)


class SegmentGEMM:
    """`SegmentGEMMWrapper`: rows of no segment are left as they are in fresh memory, here NaN."""

    def __init__(self, workspace: torch.Tensor) -> None:
        assert workspace.dtype == torch.uint8

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        *,
        seg_indptr: torch.Tensor,
    ) -> torch.Tensor:
        assert weight_column_major
        assert seg_indptr.dtype == torch.int64
        assert seg_indptr.shape == (batch_size + 1,)
        out = torch.full((len(x), weights.shape[1]), torch.nan, dtype=x.dtype)
        for weight, (first, last) in zip(weights, pairwise(seg_indptr.tolist()), strict=True):
            out[first:last] = (x[first:last].float() @ weight.float().T).to(x.dtype)
        return out


def _softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    assert logits.dtype == temperature.dtype == torch.float32
    assert logits.isfinite().any(-1).all()
    return torch.softmax(logits / temperature.unsqueeze(-1), -1)


def _top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Tokens that tie with the last one are kept, too."""
    assert bool(((top_k > 0) & (top_k < max(probs.shape[-1], 2))).all())
    edge = probs.sort(-1, descending=True).values.gather(-1, top_k.to(torch.int64).unsqueeze(-1) - 1)
    kept = probs.where(probs >= edge, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _top_p_renorm_probs(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    assert bool(((top_p > 0) & (top_p < 1)).all())
    ordered = probs.sort(-1, descending=True)
    before = ordered.values.cumsum(-1) - ordered.values
    edge = ordered.values.where(before < top_p.unsqueeze(-1), 2.0).amin(-1, keepdim=True)
    kept = probs.where(probs >= edge, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _min_p_sampling_from_probs(
    probs: torch.Tensor, min_p: torch.Tensor, *, seed: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """A stream that depends on the row."""
    assert seed.dtype == offset.dtype == torch.int64
    assert bool((seed >= 0).all())
    kept = probs.where(probs >= min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True), 0.0)
    drawn = []
    for row, (values, a, b) in enumerate(zip(kept, seed.tolist(), offset.tolist(), strict=True)):
        generator = torch.Generator().manual_seed((a * 31 + b * 17 + row) % (1 << 62))
        drawn.append(int(torch.multinomial(values, 1, generator=generator)))
    return torch.tensor(drawn, dtype=torch.int32)


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
    module.BatchMLAPagedAttentionWrapper, module.SegmentGEMMWrapper = MLA, SegmentGEMM
    module.softmax, module.min_p_sampling_from_probs = _softmax, _min_p_sampling_from_probs
    module.top_k_renorm_probs, module.top_p_renorm_probs = _top_k_renorm_probs, _top_p_renorm_probs
    module.mla = ModuleType("flashinfer.mla")
    module.mla.MLAPlanMetadata = MLAMetadata
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module.mla)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    yield
    for name in ("rows", "attention", "mla", "experts", "sampling"):
        sys.modules.pop(f"tokenspeed_kernels_flashinfer.{name}", None)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_adapter_passes_the_kit_over_the_stand_in(spec: KernelSpec, stand_in: None) -> None:
    here = replace(spec, machine=MachineRequirement(device="cpu"))
    report = verify_kernel(here, read_machine())
    assert not [result.as_dict() for result in report.failures]


def test_nothing_promises_bits() -> None:
    assert not [spec.name for spec in SPECS if BATCH_INVARIANT in spec.features or spec.bit_order]


SAMPLER = Need.of("sampling.sample", dtypes={"logits": "bfloat16"})


def test_a_stream_of_its_own_serves_only_where_none_is_asked_for() -> None:
    registry = KernelRegistry([*SPECS, *triton_specs()])
    need = replace(SAMPLER, traits=(("stream", "per-request"),))
    selection = select([SAMPLER, need], registry, replace(HOPPER, libraries={**HOPPER.libraries, "triton": "3"}))
    assert selection.choices[SAMPLER].name == "flashinfer.sampling.sample"
    assert selection.choices[need].name == "aok.triton.sampling.sample"
    reasons = {verdict.spec.name: verdict.reason for verdict in selection.verdicts[need]}
    assert reasons["flashinfer.sampling.sample"] == "declares stream=batch, and per-request is required"


def test_the_sampler_draws_from_the_filtered_distribution(stand_in: None) -> None:
    sampling = importlib.import_module("tokenspeed_kernels_flashinfer.sampling")
    rows = 4000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0]).repeat(rows, 1)
    ids = sampling.sample(
        logits,
        torch.full((rows,), 0.5),
        torch.full((rows,), 3, dtype=torch.int32),
        torch.ones(rows),
        torch.zeros(rows),
        torch.arange(rows),
        torch.zeros(rows, dtype=torch.int64),
    )
    expected = torch.softmax(torch.tensor([4.0, 2.0, 0.0]), 0)
    assert float((ids.bincount(minlength=5)[:3] / rows - expected).abs().max()) < 0.03
    assert int(ids.max()) == 2


def test_a_sampler_that_ignores_a_filter_is_caught(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer.top_k_renorm_probs", lambda probs, _top_k: probs)
    (spec,) = (spec for spec in SPECS if spec.operator == "sampling.sample")
    report = verify_kernel(replace(spec, machine=MachineRequirement(device="cpu")), read_machine())
    assert "agreement" in [result.check for result in report.failures]


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
        "from .prefill import BatchPrefillWithPagedKVCacheWrapper\n"
        "from .mla import BatchMLAPagedAttentionWrapper\nfrom .gemm import SegmentGEMMWrapper\n"
        "from .sampling import softmax, top_k_renorm_probs, top_p_renorm_probs, min_p_sampling_from_probs\n",
        "mla/__init__": "from ._core import *\n",
        "mla/_core": "from ._contracts import MLAPlanMetadata as MLAPlanMetadata\n"
        "class BatchMLAPagedAttentionWrapper:\n"
        "    def __init__(self, float_workspace_buffer, backend='auto'): ...\n"
        "    def plan(self, qo_indptr=None, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,\n"
        "             sm_scale, q_data_type, kv_data_type): ...\n"
        "    def run(self, q_nope=None, *, query=None, kv_cache=None): ...\n",
        "mla/_contracts": "class MLAPlanMetadata:\n    @classmethod\n    def csr(cls, a, b, c, d): ...\n",
        "gemm": "class SegmentGEMMWrapper:\n    def __init__(self, workspace, backend='auto'): ...\n"
        "    def run(self, x, weights, batch_size, weight_column_major, out=None, seg_indptr=None): ...\n",
        "sampling": "def softmax(logits, temperature=None): ...\ndef top_k_renorm_probs(probs, top_k): ...\n"
        "def top_p_renorm_probs(probs, top_p): ...\n"
        "def min_p_sampling_from_probs(probs, min_p, indices=None, *, seed=None, offset=None): ...\n",
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
        "BatchMLAPagedAttentionWrapper.plan",
        "BatchMLAPagedAttentionWrapper.run",
        "mla.MLAPlanMetadata.csr",
        "SegmentGEMMWrapper.run",
        "min_p_sampling_from_probs",
    }
    assert check_flashinfer_calls.faults(wheel(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"act": "def silu_and_mul(*, input): ..."}, "silu_and_mul: too many positional"),
        ({"mla/_core": "class BatchMLAPagedAttentionWrapper: ..."}, "flashinfer.mla exports no MLAPlanMetadata"),
        ({"mla/_contracts": "class MLAPlanMetadata:\n    @classmethod\n    def csr(cls, a, b, c): ..."}, "too many"),
        ({"norm/__init__": "def fused_add_rmsnorm(input, residual, weight, eps): ..."}, "exports no rmsnorm"),
        (
            {"prefill": "class BatchPrefillWithPagedKVCacheWrapper:\n    def __init__(self, b, l): ..."},
            "no method plan",
        ),
    ],
)
def test_a_changed_signature_is_noticed(changes: dict[str, str], fault: str, tmp_path: Path) -> None:
    assert any(fault in line for line in check_flashinfer_calls.faults(wheel(tmp_path, **changes)))
