"""Mixtures of experts: what a start says when nobody offers slot order, and whose kernels may take the place of aok."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenspeed.config_sources import load_config
from tokenspeed.errors import Problem
from tokenspeed.machine import named_machine
from tokenspeed.startup import Examination, examine

BASE = ["tokenspeed-reference", "tokenspeed-models"]

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 320,
    "dtype": "bfloat16",
}

ACME = """
@hookimpl
def tokenspeed_kernels():
    return [KernelSpec("acme.experts", "moe.experts", "acme", "nowhere:experts",
                       ({{"x": "bfloat16", "weight": "bfloat16"}},), features=frozenset({features}),
                       traits=trait_table({traits}), priority=Priority.PLUGIN)]
"""


def look(folder: Any, *plugins: str, base: tuple[str, ...] = (), **options: Any) -> Examination:
    path = folder.path / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    config = load_config({"model": str(path), "plugins": [*BASE, *base, *plugins], **options}, environ={})
    return examine(config, named_machine("cpu-avx2"), weights=False)


def acme(folder: Any, features: tuple[str, ...], **traits: list[str]) -> str:
    return str(folder.install("acme-moe", ACME.format(features=set(features) or "()", traits=traits)))


def refusal_of_experts(found: Examination) -> Problem:
    (problem,) = (problem for problem in found.problems if "moe.experts" in problem.summary)
    assert problem.kind == "missing-kernel"
    return problem


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({"combine_order": ["rank"]}, "declares combine_order=rank, and slot is required"),
        ({}, "does not declare combine_order, and combine_order=slot is required"),
    ],
)
def test_invariant_experts_without_slot_order_are_refused(folder: Any, traits: Any, reason: str) -> None:
    found = look(folder, acme(folder, ("batch_invariant",), **traits), numerics="rl-bitwise")
    text = refusal_of_experts(found).render()
    assert reason in text
    assert "acme.experts (acme-moe 1.2.3): rejected" in text
    assert "reference.moe.experts" in text, "every candidate has its reason"
    assert "lacks the required feature batch_invariant" in text


def test_slot_order_that_is_not_invariant_is_refused(folder: Any) -> None:
    found = look(folder, acme(folder, (), combine_order=["slot"]), numerics="rl-bitwise")
    assert "acme.experts (acme-moe 1.2.3): rejected, lacks the required feature batch_invariant" in (
        refusal_of_experts(found).render()
    )


def test_slot_order_alone_under_auto_excludes_who_does_not_declare_it(folder: Any) -> None:
    plugin = acme(folder, (), combine_order=["rank"])
    for order, chosen in (("rank", "acme.experts"), ("slot", "reference.moe.experts")):
        found = look(folder, plugin, moe_combine_order=order)
        assert found.problems == ()
        assert found.selection
        names = {need.operator: spec.name for need, spec in found.selection.choices.items()}
        assert names["moe.experts"] == chosen


def test_another_backend_takes_the_place_when_it_declares_both(folder: Any) -> None:
    plugin = acme(folder, ("batch_invariant",), combine_order=["slot", "rank"])
    found = look(folder, plugin, base=("tokenspeed-kernels-aok",), numerics="rl-bitwise", moe_backend="acme")
    assert found.problems == ()
    assert found.selection
    names = {need.operator: spec.name for need, spec in found.selection.choices.items()}
    assert names["moe.experts"] == "acme.experts"
    found = look(folder, plugin, base=("tokenspeed-kernels-aok",), numerics="rl-bitwise")
    assert found.selection
    names = {need.operator: spec.name for need, spec in found.selection.choices.items()}
    assert names["moe.experts"] == "aok.moe.experts", "auto becomes aok, whatever the priorities"


def test_another_backend_that_declares_less_is_a_conflict(folder: Any) -> None:
    plugin = acme(folder, ("batch_invariant",), combine_order=["rank"])
    found = look(folder, plugin, base=("tokenspeed-kernels-aok",), numerics="rl-bitwise", moe_backend="acme")
    (problem,) = (problem for problem in found.problems if problem.kind == "conflict")
    assert "--moe-backend acme was given" in problem.summary
    assert "--moe-backend aok" in problem.summary


@pytest.mark.parametrize("options", [{"numerics": "rl-bitwise"}, {"moe_combine_order": "slot"}])
def test_experts_that_are_split_over_ranks_are_refused_under_slot_order(folder: Any, options: dict[str, Any]) -> None:
    found = look(folder, base=("tokenspeed-kernels-aok",), tensor_parallel_size=2, **options)
    (problem,) = found.problems
    text = problem.render()
    assert "--tensor-parallel-size 2 was given, and a mixture of experts" in text
    assert "--moe-combine-order slot" in text
    assert "a second fold" in text
    assert look(folder, base=("tokenspeed-kernels-aok",), tensor_parallel_size=1, **options).problems == ()


def test_several_ranks_are_refused_in_any_order(folder: Any) -> None:
    (problem,) = look(folder, tensor_parallel_size=4, moe_combine_order="rank").problems
    assert "--tensor-parallel-size 4 was given; every layer is computed in one process" in problem.render()


def test_a_router_that_knows_only_the_short_form_is_refused_for_the_other(folder: Any) -> None:
    folder.install(
        "short-router",
        """
        @hookimpl
        def tokenspeed_kernels():
            return [KernelSpec("short.route", "moe.route", "short", "nowhere:route", ({"logits": "bfloat16"},),
                               traits=trait_table({"form": {"fused"}}), priority=Priority.PLUGIN)]
        """,
    )
    for form, chosen in (("fused", "short.route"), ("torch", "reference.moe.route")):
        found = look(folder, "short-router", router_topk=form)
        assert found.selection
        names = {need.operator: spec.name for need, spec in found.selection.choices.items()}
        assert names["moe.route"] == chosen
