"""Under rl-bitwise, neither the engine nor an adopted model's forward multiplies matrices by torch.

On a GPU torch's products are cuBLAS's, whose bits depend on settings that may come too late for a process which has
used the GPU before. Only the chosen kernels multiply; gradients are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed import LLM, SamplingParams
from tokenspeed.trainer import adopt, logprobs

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr", "matmul", "linear")
PRODUCTS += ("einsum", "convolution", "_scaled_dot_product", "scaled_dot_product", "_grouped_mm", "_scaled_mm")

IDS = [5, 90, 17, 44, 101, 33, 7, 250, 61, 9, 12]


class Watch(TorchDispatchMode):
    """Names of the operations of torch that run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> set[str]:
        return {name for name in self.names if name.removeprefix("aten::").startswith(PRODUCTS)}


def generate(**options: Any) -> Watch:
    """What runs for prompts in chunks, decoding, every way of sampling, and every kind of log-probability."""
    params = [
        SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=4, top_p=0.9, top_k=7, min_p=0.01, seed=1, repetition_penalty=1.2, ignore_eos=True),
        SamplingParams(max_tokens=4, seed=2, logit_bias={5: 1.0}, frequency_penalty=0.5, logprobs=0, ignore_eos=True),
    ]
    with (
        LLM("tiny", max_num_batched_tokens=16, max_num_seqs=3, max_model_len=128, **options) as llm,
        Watch() as watch,
    ):
        llm.generate([IDS * 3, IDS, IDS[:2]], params)
    return watch


def test_no_step_of_an_engine_multiplies_by_torch() -> None:
    watch = generate(numerics="rl-bitwise")
    assert watch.products == set()
    assert len(watch.names) > 10


def test_a_projection_by_torch_would_be_seen() -> None:
    """The control: the reference kernels, which promise nothing and are never chosen under rl-bitwise."""
    assert generate(numerics="auto", kernel={"gemm.linear": "reference.gemm.linear"}).products


def test_no_forward_of_a_trainer_multiplies_by_torch(
    make_folder: Callable[[str, torch.dtype], Path], load_trainer: Callable[[Path], Any]
) -> None:
    model = load_trainer(make_folder("Qwen3", torch.bfloat16))
    ids = torch.tensor([IDS])
    with Watch() as before:
        model(ids)
    assert before.products
    adopt(model)
    with Watch() as forward:
        scores = logprobs(model(ids).logits[0, :-1], ids[0, 1:])
    assert forward.products == set()
    assert {"tokenspeed::linear", "tokenspeed::attention", "tokenspeed::logprobs"} <= forward.names
    with Watch() as backward:
        scores.sum().backward()
    assert backward.products
