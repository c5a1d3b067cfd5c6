"""Envelope resolution: what each switch becomes and why, and every conflict with its words."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

import pytest

from tokenspeed.kernels.spec import BATCH_INVARIANT, KernelSpec, trait_table
from tokenspeed.numerics.envelopes import BUILTIN_TRAINERS, ENVELOPES, TrainerProfile
from tokenspeed.numerics.resolve import resolve
from tokenspeed.numerics.switches import SWITCHES

TIGHT = {
    "autotune": "off",
    "tf32": "off",
    "pdl": "off",
    "collectives": "ordered",
    "allreduce_fusion": "off",
    "kernel_features": "batch_invariant",
    "moe_backend": "aok",
    "sampling_stream": "per-request",
    "dsa_slot_order": "sorted",
    "yarn_ramp_mask_device": "cpu",
    "mla_lora_scale": "runtime",
    "layer_boundary_norm": "unfused",
    "router_topk": "torch",
    "logprob_order": "megatron",
    "moe_combine_order": "slot",
}
"""The column `rl-bitwise` of the numerics page, written down a second time on purpose."""


def test_auto_takes_every_default_and_promises_nothing() -> None:
    resolution = resolve("auto")
    assert resolution.problems == ()
    numerics = resolution.numerics
    assert numerics.switches == {name: switch.values[0] for name, switch in SWITCHES.items()}
    assert (numerics.promises, numerics.features, numerics.traits, numerics.trainer) == ((), frozenset(), {}, None)


def test_rl_bitwise_takes_every_tight_value() -> None:
    resolution = resolve("rl-bitwise")
    assert resolution.problems == ()
    numerics = resolution.numerics
    assert numerics.switches == TIGHT
    assert numerics.promises == ("run", "batch", "trainer")
    assert numerics.features == {"batch_invariant"}
    assert numerics.traits == {
        "moe.experts": {"combine_order": "slot"},
        "sampling.sample": {"stream": "per-request"},
        "attention.sparse_paged": {"slot_order": "sorted"},
        "sampling.logprobs": {"block_order": "aok_tree"},
        "sampling.block_sumexp": {"block_order": "aok_tree"},
    }
    assert numerics.trainer == "megatron"


def test_the_transformers_trainer_differs_in_one_switch() -> None:
    numerics = resolve("rl-bitwise", "transformers").numerics
    assert numerics.switches == TIGHT | {"logprob_order": "torch"}
    assert numerics.reasons["logprob_order"] == "required by trainer transformers"
    assert "sampling.logprobs" not in numerics.traits


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_works_alone_under_auto(name: str) -> None:
    resolution = resolve("auto", None, {name: TIGHT[name]}, sources={name: "tests"})
    assert resolution.problems == ()
    defaults = resolve("auto").numerics.switches
    assert resolution.numerics.switches == {**defaults, name: TIGHT[name]}
    assert resolution.numerics.reasons[name].startswith("given (tests)")


def test_single_switches_carry_their_requirements() -> None:
    assert resolve("auto", None, {"kernel_features": "batch_invariant"}).numerics.features == {"batch_invariant"}
    assert resolve("auto", None, {"moe_combine_order": "slot"}).numerics.traits == {
        "moe.experts": {"combine_order": "slot"}
    }


@pytest.mark.parametrize("name", SWITCHES)
def test_a_looser_given_value_is_a_conflict(name: str) -> None:
    loose = SWITCHES[name].values[0]
    resolution = resolve("rl-bitwise", None, {name: loose}, sources={name: "environment variable X"})
    (problem,) = resolution.problems
    assert problem.kind == "conflict"
    switch = SWITCHES[name]
    assert problem.summary == (
        f"{switch.spelled(loose)} was given (environment variable X), "
        f"but --numerics rl-bitwise needs {switch.spelled(TIGHT[name])}"
    )
    assert problem.details[0].startswith("it would break the promise: ")
    assert f"it changes: {switch.changes}" in problem.details
    # Never overwritten in silence, and never followed either: the value only serves to look for further problems.
    assert resolution.numerics.switches[name] == TIGHT[name]


def test_the_tight_value_may_be_given() -> None:
    resolution = resolve("rl-bitwise", None, TIGHT)
    assert resolution.problems == ()
    assert resolution.numerics.reasons["collectives"] == "required by rl-bitwise, also given"


def test_all_conflicts_are_collected() -> None:
    given = {"tf32": "on", "router_topk": "fused", "logprob_order": "quick", "no_such": "x"}
    kinds = [problem.kind for problem in resolve("rl-bitwise", "nobody", given).problems]
    assert sorted(kinds) == ["conflict", "conflict", "unknown-value", "unknown-value", "unknown-value"]


def test_an_unknown_value_names_flag_list_and_value() -> None:
    (problem,) = resolve("auto", None, {"collectives": "quick"}).problems
    assert problem.summary == "--collectives: 'quick' is not one of fast, ordered"
    (problem,) = resolve("bitwise").problems
    assert problem.summary == "--numerics: 'bitwise' is not one of auto, rl-bitwise"
    (problem,) = resolve("rl-bitwise", "verl").problems
    assert problem.summary == "--trainer: 'verl' is not one of megatron, transformers"


def test_a_trainer_under_auto_is_refused_not_ignored() -> None:
    (problem,) = resolve("auto", "megatron").problems
    assert problem.summary == "--trainer megatron was given, but --numerics auto promises no trainer alignment"


def moe_kernel(**more: Any) -> KernelSpec:
    return KernelSpec("theirs.experts", "moe.experts", "theirs", "m:f", ({"x": "bfloat16"},), **more)


def test_another_moe_backend_is_accepted_only_when_it_keeps_the_promise() -> None:
    good = moe_kernel(features=frozenset({BATCH_INVARIANT}), traits=trait_table({"combine_order": ["rank", "slot"]}))
    resolution = resolve("rl-bitwise", None, {"moe_backend": "theirs"}, kernels=[good])
    assert resolution.problems == ()
    assert resolution.numerics.switches["moe_backend"] == "theirs"
    for bad in (
        moe_kernel(features=frozenset({BATCH_INVARIANT})),
        moe_kernel(traits=trait_table({"combine_order": ["slot"]})),
        moe_kernel(features=frozenset({BATCH_INVARIANT}), traits=trait_table({"combine_order": ["rank"]})),
    ):
        (problem,) = resolve("rl-bitwise", None, {"moe_backend": "theirs"}, kernels=[bad]).problems
        assert "no installed kernel of theirs declares batch_invariant and combine_order=slot" in problem.details


def test_vocab_shards_set_the_block_and_the_order_inside() -> None:
    numerics = resolve("rl-bitwise", "megatron,vocab-shards=4").numerics
    assert numerics.trainer == "megatron,vocab-shards=4"
    # Padded to a multiple of 128 * 4, then divided: 151936 -> 152064 / 4.
    assert numerics.logprob_block(151936) == 38016
    assert numerics.logprob_block(512) == 128
    assert numerics.traits["sampling.logprobs"] == {"block_order": "torch_sum"}
    assert resolve("rl-bitwise").numerics.logprob_block(151936) == 32768
    assert resolve("auto").numerics.logprob_block(151936) == 32768


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("megatron,shards=4", "--trainer: 'shards' is not an option of megatron; its options: vocab-shards"),
        ("megatron,vocab-shards=0", "--trainer: vocab-shards='0' is not a positive integer"),
        ("megatron,vocab-shards", "--trainer: 'vocab-shards' is not KEY=VALUE (as in megatron,vocab-shards=8)"),
        (
            "transformers,vocab-shards=2",
            "--trainer: 'vocab-shards' is not an option of transformers; its options: none",
        ),
    ],
)
def test_wrong_trainer_options(text: str, expected: str) -> None:
    (problem,) = resolve("rl-bitwise", text).problems
    assert problem.summary == expected


def test_a_trainer_profile_of_a_plugin() -> None:
    mine = TrainerProfile("mine", "", MappingProxyType({**BUILTIN_TRAINERS[0].tight, "router_topk": "fused"}))
    numerics = resolve("rl-bitwise", "mine", profiles=[*BUILTIN_TRAINERS, mine]).numerics
    assert numerics.switches["router_topk"] == "fused"
    # Promises about runs and batches do not depend on the profile.
    assert numerics.switches["sampling_stream"] == "per-request"


def test_the_tables_agree_with_each_other() -> None:
    run_and_batch = {name for name, switch in SWITCHES.items() if "trainer" not in switch.promises}
    assert ENVELOPES["rl-bitwise"].tight.keys() == run_and_batch
    for profile in BUILTIN_TRAINERS:
        assert profile.tight.keys() == SWITCHES.keys() - run_and_batch
    for name, value in TIGHT.items():
        assert SWITCHES[name].fault(value) is None
        assert re.fullmatch(r"--[a-z0-9-]+", SWITCHES[name].flag)


def test_gpu_only_switches_say_so_on_a_cpu() -> None:
    assert resolve("auto").numerics.reasons["tf32"] == "default; no effect on a CPU"
    assert resolve("auto", device="cuda").numerics.reasons["tf32"] == "default"


def test_the_resolved_value_is_frozen() -> None:
    numerics = resolve("rl-bitwise").numerics
    with pytest.raises(TypeError):
        numerics.switches["tf32"] = "on"  # type: ignore[index]
    with pytest.raises(AttributeError):
        numerics.envelope = "auto"  # type: ignore[misc]
