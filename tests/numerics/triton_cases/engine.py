"""The embedded model on Triton kernels alone: every reply alone, in company, in chunks, teacher-forced, in a bucket.

For the emulated GPU and the interpreter, which both compute with the CPU's memory: the kernels are registered as if the
CPU were their machine, and none of the CPU's own. On a GPU `tokenspeed numerics verify` does the same for real.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tokenspeed import SamplingParams
from tokenspeed.config_sources import load_config
from tokenspeed.kernels.spec import KernelSpec, MachineRequirement
from tokenspeed.verify.items import Item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import alone, together
from tokenspeed_kernels_aok import plugin
from tokenspeed_kernels_aok.triton import gemm
from tokenspeed_kernels_aok.triton.launch import arch_of
from tokenspeed_kernels_aok.triton.specs import triton_specs
from triton_cases.support import DEVICE


def _here() -> tuple[KernelSpec, ...]:
    """The kernels of this architecture, for whatever machine this is."""
    arch = arch_of(DEVICE)
    return tuple(replace(spec, machine=MachineRequirement()) for spec in triton_specs() if arch in spec.machine.arch)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with mock.patch.object(plugin, "SPECS", ()), mock.patch.object(plugin, "triton_specs", _here):
        yield Lab(load_config({"model": "tiny", "numerics": "rl-bitwise", "device": "cpu"}, environ={}))


def varying_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The fault that the comparison must see: one row is the sum of two halves of K, several rows are not."""
    if len(x) > 1:
        return gemm.linear(x, weight, bias)
    half = x.shape[1] // 2
    parts = gemm.linear(x[:, :half], weight[:, :half], bias), gemm.linear(x[:, half:], weight[:, half:])
    return (parts[0].float() + parts[1].float()).to(x.dtype)


def _with_a_varying_kernel() -> tuple[KernelSpec, ...]:
    varying = f"{__name__}:varying_linear"
    return tuple(replace(s, implementation=varying) if s.operator == "gemm.linear" else s for s in _here())


def _item(lab: Lab, seed: int, length: int, temperature: float) -> Item:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=3, logprobs=2, ignore_eos=True)
    return Item(f"{length} tokens", tuple((7 * seed + 13 * i) % lab.vocab_size for i in range(length)), params)


def test_only_triton_kernels_serve(lab: Lab) -> None:
    assert all(spec.name.startswith("aok.triton.") for spec in lab.plan.choices.values())


def test_replies_do_not_depend_on_company_chunks_buckets_or_the_way_they_are_computed(lab: Lab) -> None:
    items = [_item(lab, 1, 5, 0.0), _item(lab, 2, 19, 1.0), _item(lab, 3, 34, 0.8)]
    replies = [lab.alone(item) for item in items]
    assert all(len(reply.token_ids) == 3 for reply in replies)
    for setup, evidence in (({"max_chunk": 7}, "chunked prefills"), ({"bucket_rows": (4,)}, "recorded steps")):
        run = lab.run(together(items, **setup))
        assert list(run.outcomes) == replies
        assert run.evidence[evidence] > 0
        assert max(run.batch_sizes) == len(items)
    for item, reply in zip(items, replies, strict=True):
        forced = item.but("forced", prompt=[*item.prompt, *reply.token_ids], max_tokens=0, prompt_logprobs=0)
        scored = lab.run(alone(forced)).outcomes[0]
        assert scored.prompt_bits[len(item.prompt) - 1 :] == reply.bits


def test_a_kernel_that_adds_otherwise_for_one_row_is_caught() -> None:
    with mock.patch.object(plugin, "SPECS", ()), mock.patch.object(plugin, "triton_specs", _with_a_varying_kernel):
        lab = Lab(load_config({"model": "tiny", "numerics": "rl-bitwise", "device": "cpu"}, environ={}))
    items = [_item(lab, 1, 5, 0.0), _item(lab, 2, 19, 1.0)]
    assert lab.run(together(items)).outcomes[0] != lab.alone(items[0])
