"""The chain of equalities under rl-bitwise on mixtures of experts: the scenarios of `numerics verify`, in process.

Half of the router's rows are copies of others and some differ by one unit in the last place, so tokens meet exact ties
and near ties all the time.
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

from small_configs import DEEPSEEK, LONGCAT, MAGNITUDES, MIXTRAL, QWEN3_MOE, yarn
from tokenspeed.config_sources import load_config
from tokenspeed.verify.invariance import verify_engine
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.scenario import Work
from tokenspeed.verify.scenarios import SCENARIOS

pytestmark = pytest.mark.usefixtures("one_thread")

WORK = Work("test", 8, 10, 5, 2, (1, 16, 33), long_tokens=40)
ALL: tuple[str, ...] = ()
CORE = ("batch", "chunks", "prefix", "preemption", "prefill")

MODELS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", ALL, {**QWEN3_MOE, "norm_topk_prob": True}),
    "deepseek-v3": (
        "DeepseekV3",
        ALL,
        {
            **DEEPSEEK,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "rope_parameters": {**yarn(128), **MAGNITUDES},
        },
    ),
    "longcat-flash": ("LongcatFlash", CORE, {**LONGCAT, "intermediate_size": 160, "zero_expert_num": 5}),
    "mixtral": ("Mixtral", CORE, MIXTRAL),
}


def with_ties(source: Path, folder: Path) -> Path:
    """The checkpoint with router rows (and biases) 2i+1 = 2i, every fourth row one unit in the last place away.

    A router that computes in fp32 gets its weights in fp32, so that the unit is one of its own.
    """
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    gates = [name for name in tensors if name.endswith((".gate.weight", ".classifier.weight"))]
    assert gates
    for name in gates:
        bias = tensors.get(name.replace("classifier.weight", "weight").replace("weight", "e_score_correction_bias"))
        gate = tensors[name] = tensors[name] if bias is None else tensors[name].float()
        gate[1::2] = gate[0::2][: len(gate[1::2])]
        gate.view(torch.int16 if gate.dtype == torch.bfloat16 else torch.int32)[3::4] ^= 1
        if bias is not None:
            bias[1::2] = bias[0::2]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_every_equality_holds(name: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    family, only, config = MODELS[name]
    folder = with_ties(make_checkpoint(family, dtype=torch.bfloat16, **config), tmp_path / "model")
    options = {"model": str(folder), "numerics": "rl-bitwise", "threads": 1}
    lab = Lab(load_config(options, environ={}))
    assert lab.kernels("moe.experts") == ["aok.moe.experts"]
    assert lab.kernels("moe.route") == ["aok.moe.route"]
    ties = count_ties(lab)
    report = verify_engine(lab, WORK, only=only)
    assert report.holds, [result.as_dict() for result in report.results if result.verdict != "holds"]
    assert len(report.results) == (len(only) or len(SCENARIOS))
    assert ties["exact"] > 100
    assert ties["near"] > 0


def count_ties(lab: Lab) -> Counter[str]:
    """Counts, while the lab computes, exact and near ties between neighbours among the best experts of each token."""
    seen: Counter[str] = Counter()
    for operation in lab.operations:
        if operation.need.operator == "moe.route":
            operation.run = counting(operation.run, seen)
    return seen


def counting(run: Callable[..., Any], seen: Counter[str]) -> Callable[..., Any]:
    def route(logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, *rest: Any) -> Any:
        choice = logits.float() if bias is None else torch.sigmoid(logits) + bias
        best = choice.sort(-1, descending=True).values[:, : top_k + 1]
        gaps = best[:, :-1] - best[:, 1:]
        unit = 2.0**-7 if logits.dtype == torch.bfloat16 else 2.0**-22
        seen["exact"] += int((gaps == 0).sum())
        seen["near"] += int(((gaps > 0) & (gaps <= best[:, :-1].abs() * unit)).sum())
        return run(logits, bias, top_k, *rest)

    return route
