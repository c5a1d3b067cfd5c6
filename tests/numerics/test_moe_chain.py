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

from tokenspeed.config_sources import load_config
from tokenspeed.verify.invariance import verify_engine
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.scenarios import SCENARIOS, Work

pytestmark = pytest.mark.usefixtures("one_thread")

WORK = Work("test", 8, 10, 5, 2, (1, 16, 33), long_tokens=40)
ALL: tuple[str, ...] = ()
CORE = ("batch", "chunks", "prefix", "preemption", "prefill")

MODELS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3Moe",
        ALL,
        {
            "head_dim": 32,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", CORE, {"num_local_experts": 5, "num_experts_per_tok": 2}),
}


def with_ties(source: Path, folder: Path) -> Path:
    """The checkpoint with router rows 2i+1 = 2i, the fourth of each four one unit in the last place away."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    gates = [tensor for name, tensor in tensors.items() if name.endswith(".gate.weight")]
    assert gates
    for gate in gates:
        bits = gate.view(torch.int16 if gate.dtype == torch.bfloat16 else torch.int32)
        bits[1::2] = bits[0::2][: len(bits[1::2])]
        bits[3::4] ^= 1
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
    """Counts, while the lab computes, tokens whose choice meets an exact or a one-unit tie at its edge."""
    seen: Counter[str] = Counter()
    for operation in lab.operations:
        if operation.need.operator == "moe.route":
            operation.run = counting(operation.run, seen)
    return seen


def counting(run: Callable[..., Any], seen: Counter[str]) -> Callable[..., Any]:
    def route(logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, *rest: Any) -> Any:
        ordered = logits.float().sort(-1, descending=True).values
        edge, next_one = ordered[:, top_k - 1], ordered[:, top_k]
        seen["exact"] += int((edge == next_one).sum())
        unit = 2.0**-7 if logits.dtype == torch.bfloat16 else 2.0**-22
        seen["near"] += int(((edge != next_one) & (edge - next_one <= edge.abs() * unit)).sum())
        return run(logits, bias, top_k, *rest)

    return route
