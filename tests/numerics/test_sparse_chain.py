"""The chain of equalities under rl-bitwise on sparse latent attention: the scenarios of `numerics verify`, in process.

The indexers are made so that queries meet exact ties and near ties of scores all the time, also where the choice ends.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_configs import DEEPSEEK
from tokenspeed.config_sources import load_config
from tokenspeed.verify.invariance import verify_engine
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.scenario import Work
from tokenspeed.verify.scenarios import SCENARIOS

pytestmark = pytest.mark.usefixtures("one_thread")

WORK = Work("test", 8, 10, 5, 2, (1, 16, 33), long_tokens=40)
ALL: tuple[str, ...] = ()
CORE = ("batch", "chunks", "prefix", "preemption", "prefill")
TOP_K = 13

SPARSE = {
    **DEEPSEEK,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "num_hidden_layers": 3,
    "index_n_heads": 3,
    "index_head_dim": 14,
    "index_topk": TOP_K,
}
MODELS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "deepseek-v3.2": ("DeepseekV32", ALL, SPARSE),
    "glm-moe-dsa": ("GlmMoeDsa", CORE, {**SPARSE, "indexer_types": ["full", "shared", "full"]}),
}


def with_ties(source: Path, folder: Path) -> Path:
    """The checkpoint with another indexer in layer 1, if it has one: its keys are all the same. In layer 2 they take a
    few neighbouring values, and in layer 0 few heads with products below zero give many equal zeros."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, slope in ((1, 0.0), (2, 2.0**-7)):
        norm = f"model.layers.{layer}.self_attn.indexer.k_norm"
        if f"{norm}.weight" in tensors:
            weight, bias = tensors[f"{norm}.weight"], tensors[f"{norm}.bias"]
            weight[:], bias[:] = 0, 0
            weight[10:], bias[10:] = slope, 1.0  # features that are not rotated
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_lab(name: str, make_checkpoint: Callable[..., Path], folder: Path, dtype: torch.dtype = torch.bfloat16) -> Lab:
    family, _, config = MODELS[name]
    model = with_ties(make_checkpoint(family, dtype=dtype, **config), folder / "model")
    return Lab(load_config({"model": str(model), "numerics": "rl-bitwise", "threads": 1}, environ={}))


@pytest.mark.parametrize("name", MODELS)
def test_every_equality_holds(name: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    only = MODELS[name][1]
    lab = make_lab(name, make_checkpoint, tmp_path)
    for operator in ("index_scores", "index_topk", "sparse_paged"):
        assert lab.kernels(f"attention.{operator}") == [f"aok.attention.{operator}"]
    seen = watch(lab)
    report = verify_engine(lab, WORK, only=only)
    assert report.holds, [result.as_dict() for result in report.results if result.verdict != "holds"]
    assert len(report.results) == (len(only) or len(SCENARIOS))
    assert seen["chosen among more"] > 1000
    assert seen["everything chosen"] > 100
    assert seen["tie at the end"] > 100
    assert seen["near tie at the end"] > 100
    assert seen["pages out of order"] > 100


def last_of_equals_in_a_crowd(run: Callable[..., Any]) -> Callable[..., Any]:
    """Ties go to the lowest position in small batches, and to the highest in large ones."""

    def choose(scores: torch.Tensor, positions: torch.Tensor, top_k: int) -> Any:
        if len(scores) <= 8:
            return run(scores, positions, top_k)
        last = scores.shape[1] - 1
        seen = scores.where(torch.arange(last + 1) <= positions.unsqueeze(-1), -torch.inf)
        found = last - run(seen.flip(-1), torch.full_like(positions, last), top_k)
        return found.where((found <= positions.unsqueeze(-1)) & (found >= 0), -1).sort(-1, descending=True).values

    return choose


def by_slot(run: Callable[..., Any]) -> Callable[..., Any]:
    """Chosen entries are reduced in the order in which they lie in the cache."""

    def attend(q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor, *rest: Any) -> Any:
        lengths, tables, scale, latent_dim, _ = rest
        sequences = torch.repeat_interleave(torch.arange(len(lengths)), starts.diff())
        sequences = torch.nn.functional.pad(sequences, (0, len(q) - len(sequences)))
        slots = tables[sequences].gather(1, indices.clamp_min(0).long() // 16) * 16 + indices % 16
        order = slots.masked_fill(indices < 0, 1 << 30).argsort(-1)
        return run(q, cache, indices.gather(1, order), starts, lengths, tables, scale, latent_dim, "selection")

    return attend


@pytest.mark.parametrize(
    ("operator", "broken", "scenario"),
    [("index_topk", last_of_equals_in_a_crowd, "batch"), ("sparse_paged", by_slot, "memory")],
)
def test_a_kernel_that_breaks_it_is_found(
    operator: str,
    broken: Callable[..., Any],
    scenario: str,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    # In fp32 every sum in another order shows, also in so small a model.
    honest, lab = (make_lab("glm-moe-dsa", make_checkpoint, tmp_path / name, torch.float32) for name in ("a", "b"))
    assert verify_engine(honest, WORK, only=(scenario,)).holds
    for operation in lab.operations:
        if operation.need.operator == f"attention.{operator}":
            operation.run = broken(operation.run)
    report = verify_engine(lab, WORK, only=(scenario,))
    assert [result.verdict for result in report.results] == ["differs"], [r.as_dict() for r in report.results]


def watch(lab: Lab) -> Counter[str]:
    """Counts, while the lab computes, what the choices were made of, and sequences whose pages do not lie in order."""
    seen: Counter[str] = Counter()
    for operation in lab.operations:
        if operation.need.operator == "attention.index_topk":
            operation.run = counting_choices(operation.run, seen)
        if operation.need.operator == "attention.sparse_paged":
            operation.run = counting_pages(operation.run, seen)
    return seen


def counting_choices(run: Callable[..., Any], seen: Counter[str]) -> Callable[..., Any]:
    def choose(scores: torch.Tensor, positions: torch.Tensor, top_k: int) -> Any:
        assert top_k == TOP_K
        more = positions >= top_k
        seen["everything chosen"] += int((~more).sum())
        seen["chosen among more"] += int(more.sum())
        if more.any():
            columns = torch.arange(scores.shape[1])
            visible = scores.where(columns <= positions.unsqueeze(-1), -torch.inf)[more]
            best = visible.sort(-1, descending=True).values
            last, next_one = best[:, top_k - 1], best[:, top_k]
            seen["tie at the end"] += int((last == next_one).sum())
            seen["near tie at the end"] += int(((last > next_one) & (last - next_one <= last.abs() * 2.0**-7)).sum())
        return run(scores, positions, top_k)

    return choose


def counting_pages(run: Callable[..., Any], seen: Counter[str]) -> Callable[..., Any]:
    def attend(q: torch.Tensor, cache: torch.Tensor, *rest: Any) -> Any:
        _, _, lengths, tables, *_ = rest
        for length, table in zip(lengths.tolist(), tables.tolist(), strict=True):
            pages = table[: -(-length // 16)]
            seen["pages out of order"] += pages != sorted(pages)
        return run(q, cache, *rest)

    return attend
