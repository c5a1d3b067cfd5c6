"""Sparse attention: what a start says when one kernel for it is missing or declares something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenspeed_models
from tokenspeed.config_sources import load_config
from tokenspeed.errors import Problem, StartRefused
from tokenspeed.machine import named_machine
from tokenspeed.startup import Examination, examine, launch, prepare

BASE = ["tokenspeed-reference", "tokenspeed-models"]

CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 32,
    "vocab_size": 320,
    "dtype": "bfloat16",
}

SMALL = {name: value for name, value in CONFIG.items() if name not in ("architectures", "dtype", "num_attention_heads")}

ACME = """
from dataclasses import replace
from tokenspeed_kernels_aok.specs import SPECS

@hookimpl
def tokenspeed_kernels():
    kept = [replace(spec, name="acme." + spec.operator) for spec in SPECS if spec.operator != "{operator}"]
    own = KernelSpec("acme.{operator}", "{operator}", "aok", "nowhere:kernel", {signatures},
                     features=frozenset({features}), traits=trait_table({traits}), priority=Priority.PLUGIN)
    return [*kept, own]
"""
"""Every kernel of aok but one, in whose place there is another."""

PLANES = ({"x": "bfloat16", "kv": "bfloat16"},)


def look(folder: Any, *plugins: str, **options: Any) -> Examination:
    path = folder.path / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    config = load_config({"model": str(path), "plugins": [*BASE, *plugins], **options}, environ={})
    return examine(config, named_machine("cpu-avx2"), weights=False)


def acme(
    folder: Any,
    operator: str,
    *,
    signatures: tuple[dict[str, str], ...] = PLANES,
    features: tuple[str, ...] = ("batch_invariant",),
    **traits: list[str],
) -> str:
    text = ACME.format(operator=operator, signatures=signatures, features=set(features) or "()", traits=traits)
    return str(folder.install("acme-sparse", text))


def the_refusal(found: Examination, operator: str) -> Problem:
    """The other problem is that aok itself, whose place is taken, is not among the plugins."""
    (problem,) = (problem for problem in found.problems if problem.kind == "missing-kernel")
    assert f"no kernel can serve {operator} " in problem.summary
    assert {problem.kind for problem in found.problems} == {"missing-kernel", "disabled-plugin"}
    return problem


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({"slot_order": ["selection"]}, "declares slot_order=selection, and sorted is required"),
        ({}, "does not declare slot_order, and slot_order=sorted is required"),
    ],
)
def test_invariant_attention_without_sorted_order_is_refused(folder: Any, traits: Any, reason: str) -> None:
    operator = "attention.sparse_paged"
    text = the_refusal(look(folder, acme(folder, operator, **traits), numerics="rl-bitwise"), operator).render()
    assert f"acme.{operator} (acme-sparse 1.2.3): rejected, {reason}" in text
    assert f"reference.{operator}" in text, "every candidate has its reason"
    assert "lacks the required feature batch_invariant" in text
    assert "slot_order=sorted on cpu" in text


def test_sorted_order_that_is_not_invariant_is_refused(folder: Any) -> None:
    operator = "attention.sparse_paged"
    plugin = acme(folder, operator, features=(), slot_order=["sorted"])
    text = the_refusal(look(folder, plugin, numerics="rl-bitwise"), operator).render()
    assert f"acme.{operator} (acme-sparse 1.2.3): rejected, lacks the required feature batch_invariant" in text


def test_a_plane_of_the_indexer_that_no_invariant_kernel_reads_is_refused(folder: Any) -> None:
    """Someone's kernel reads keys in eight bits; the model keeps them in bf16, and the reference promises nothing."""
    operator = "attention.index_scores"
    eight_bits = ({"x": "bfloat16", "kv": "float8_e4m3fn"},)
    plugin = acme(folder, operator, signatures=eight_bits)
    text = the_refusal(look(folder, plugin, numerics="rl-bitwise"), operator).render()
    assert "(kv bfloat16, x bfloat16)" in text
    assert "needed for index_heads=4, width=16" in text
    assert f"acme.{operator} (acme-sparse 1.2.3): rejected" in text
    assert "float8_e4m3fn" in text
    assert f"reference.{operator}" in text
    assert "lacks the required feature batch_invariant" in text


@pytest.mark.parametrize("operator", ["attention.index_scores", "attention.index_topk", "norm.layer"])
def test_an_indexer_without_an_invariant_kernel_is_refused(folder: Any, operator: str) -> None:
    signatures = {
        "attention.index_scores": PLANES,
        "attention.index_topk": ({},),
        "norm.layer": ({"x": "bfloat16", "weight": "bfloat16"},),
    }[operator]
    plugin = acme(folder, operator, signatures=signatures, features=())
    assert the_refusal(look(folder, plugin, numerics="rl-bitwise"), operator)


def test_every_kernel_in_its_place_starts(folder: Any) -> None:
    plugin = acme(folder, "attention.sparse_paged", slot_order=["sorted", "selection"])
    found = look(folder, plugin, numerics="rl-bitwise")
    assert found.problems == ()
    assert found.selection
    names = {need.operator: spec.name for need, spec in found.selection.choices.items()}
    assert names["attention.sparse_paged"] == "acme.attention.sparse_paged"


def test_the_order_alone_decides_who_is_eligible_under_auto(folder: Any) -> None:
    """Which changes the kernel of one operator and no other."""
    plugin = acme(folder, "attention.sparse_paged", features=(), slot_order=["selection"])
    chosen = {}
    for order in ("selection", "sorted"):
        found = look(folder, plugin, dsa_slot_order=order)
        assert found.problems == ()
        assert found.selection
        chosen[order] = {need.operator: spec.name for need, spec in found.selection.choices.items()}
    assert chosen["selection"].pop("attention.sparse_paged") == "acme.attention.sparse_paged"
    assert chosen["sorted"].pop("attention.sparse_paged") == "reference.attention.sparse_paged"
    assert chosen["selection"] == chosen["sorted"]


def test_selection_order_conflicts_with_the_promise(folder: Any) -> None:
    found = look(folder, "tokenspeed-kernels-aok", numerics="rl-bitwise", dsa_slot_order="selection")
    (problem,) = found.problems
    assert problem.kind == "conflict"
    assert "--dsa-slot-order selection" in problem.summary
    assert "--dsa-slot-order sorted" in problem.summary
    assert look(folder, "tokenspeed-kernels-aok", numerics="rl-bitwise", dsa_slot_order="sorted").problems == ()


LIAR = """
from tokenspeed import BATCH_INVARIANT
from tokenspeed_kernels_aok.cpu.sparse import attention

def as_they_come(*arguments):
    return attention(*arguments[:-1], "selection")

@hookimpl
def tokenspeed_kernels():
    return [KernelSpec("liar.sparse", "attention.sparse_paged", "liar", "liar_kernels:as_they_come",
                       ({"x": "bfloat16", "kv": "bfloat16"},), features=frozenset({BATCH_INVARIANT}),
                       traits=trait_table({"slot_order": {"sorted"}}), priority=Priority.PLUGIN)]
"""


def test_who_declares_sorted_order_and_reduces_as_the_indices_come_is_found_at_the_start(
    folder: Any, make_checkpoint: Any
) -> None:
    model = make_checkpoint(
        "DeepseekV32", dtype=torch.bfloat16, num_key_value_heads=6, n_group=1, topk_group=1, **SMALL
    )
    folder.install("liar-kernels", LIAR)

    def start(**options: Any) -> Any:
        tokenizer = str(Path(tokenspeed_models.__file__).parent / "tiny")
        config = {"model": str(model), "tokenizer": tokenizer, "num_kv_pages": 64, "max_model_len": 256, **options}
        return launch(prepare(load_config(config, environ={})))

    with pytest.raises(StartRefused) as caught:
        start(numerics="rl-bitwise")
    (problem,) = caught.value.problems
    assert problem.kind == "unproved-kernel"
    assert problem.summary.startswith("kernel liar.sparse of liar-kernels 1.2.3 does not keep what it declares")
    assert problem.details[0].startswith("layout: pages in another order")
    start(numerics="rl-bitwise", kernel={"attention.sparse_paged": "aok.attention.sparse_paged"})
