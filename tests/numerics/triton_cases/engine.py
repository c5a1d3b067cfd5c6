"""The embedded model on Triton kernels alone: every reply alone, in company, in chunks, teacher-forced, in a bucket.

For the emulated GPU and the interpreter, which both compute with the CPU's memory: the kernels are registered as if the
CPU were their machine, and none of the CPU's own. On a GPU `tokenspeed numerics verify` does the same for real.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest

from tokenspeed import SamplingParams
from tokenspeed.config_sources import load_config
from tokenspeed.kernels.spec import KernelSpec, MachineRequirement
from tokenspeed.verify.items import Item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import alone, together
from tokenspeed_kernels_aok import plugin
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


def _item(lab: Lab, seed: int, length: int, temperature: float) -> Item:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=3, logprobs=2, ignore_eos=True)
    return Item(f"{length} tokens", tuple((7 * seed + 13 * i) % lab.vocab_size for i in range(length)), params)


def test_only_triton_kernels_serve(lab: Lab) -> None:
    assert all(spec.name.startswith("aok.triton.") for spec in lab.plan.choices.values())


def test_replies_do_not_depend_on_company_chunks_buckets_or_the_way_they_are_computed(lab: Lab) -> None:
    items = [_item(lab, 1, 5, 0.0), _item(lab, 2, 19, 1.0), _item(lab, 3, 34, 0.8)]
    replies = [lab.alone(item) for item in items]
    assert all(len(reply.token_ids) == 3 for reply in replies)
    for setup in ({"max_chunk": 7}, {"bucket_rows": (4,)}):
        run = lab.run(together(items, **setup))
        assert list(run.outcomes) == replies
    for item, reply in zip(items, replies, strict=True):
        forced = item.but("forced", prompt=[*item.prompt, *reply.token_ids], max_tokens=0, prompt_logprobs=0)
        scored = lab.run(alone(forced)).outcomes[0]
        assert scored.prompt_bits[len(item.prompt) - 1 :] == reply.bits
