"""The start up to the plan: from `config.json` alone to a decision, and every refusal on the way, all at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config_sources import load_config
from tokenspeed.errors import Problem, StartRefused
from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.machine import named_machine
from tokenspeed.startup import Examination, examine, prepare

CORE_AND_MODELS = "tokenspeed-reference,tokenspeed-models"

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}

MakeModel = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> MakeModel:
    """`model(**changes)`: a folder that holds nothing but a `config.json`."""

    def make(**changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **changes}))
        return tmp_path

    return make


def look(model: Path, machine: str = "cpu-avx2", **options: Any) -> Examination:
    config = load_config({"model": str(model), "plugins": CORE_AND_MODELS, **options}, environ={})
    return examine(config, named_machine(machine), weights=False)


def kinds(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.kind for problem in problems]


def test_a_config_alone_is_enough_for_a_decision(model: MakeModel) -> None:
    found = look(model())
    assert found.problems == ()
    assert found.selection
    used = {need.operator for need in found.selection.choices}
    assert {"embedding.lookup", "gemm.linear", "attention.paged", "sampling.sample", "sampling.logprobs"} <= used
    assert {spec.distribution for spec in found.selection.choices.values()} == {"tokenspeed"}
    assert found.selection.links == {"kv_layout": "nhd"}


def test_rl_bitwise_without_its_kernels_names_every_operator_and_the_distribution(model: MakeModel) -> None:
    found = look(model(), numerics="rl-bitwise")
    missing = [problem for problem in found.problems if problem.kind == "missing-kernel"]
    assert found.selection
    needed = {need.operator for need in found.selection.verdicts}
    named = {operator for operator in OPERATORS if any(f" {operator} (" in p.summary for p in missing)}
    assert named == needed
    for problem in missing:
        assert "bfloat16" in problem.summary or "float32" in problem.summary
        assert "with batch_invariant" in problem.summary
        assert "on cpu x86_64 (avx2, fma)" in problem.summary
        assert any("lacks the required feature batch_invariant" in line for line in problem.details)


@pytest.mark.parametrize("trainer", ["megatron", "transformers"])
def test_rl_bitwise_is_planned_with_the_kit(model: MakeModel, trainer: str) -> None:
    kit = f"{CORE_AND_MODELS},tokenspeed-kernels-aok"
    found = look(model(), numerics="rl-bitwise", trainer=trainer, plugins=kit)
    assert found.problems == ()
    assert found.selection
    for need, spec in found.selection.choices.items():
        assert need.features <= spec.features
        assert spec.distribution == "tokenspeed-kernels-aok"
        assert spec.bit_order
    assert found.selection.links == {"kv_layout": "aok_pairs"}


def test_a_trainers_own_shards_need_a_kernel_that_adds_as_it_does(model: MakeModel) -> None:
    kit = f"{CORE_AND_MODELS},tokenspeed-kernels-aok"
    found = look(model(), numerics="rl-bitwise", trainer="megatron,vocab-shards=2", plugins=kit)
    assert not found.problems
    assert found.selection
    ((need, chosen),) = [item for item in found.selection.choices.items() if item[0].operator == "sampling.logprobs"]
    assert chosen.name == "torch.sampling.logprobs"
    reasons = [verdict.reason for verdict in found.selection.verdicts[need] if verdict.spec.solution == "aok"]
    assert any("declares block_order=aok_tree, and torch_sum is required" in reason for reason in reasons)
    of_a_gpu = look(model(), "sm90", numerics="rl-bitwise", trainer="megatron,vocab-shards=2", plugins=kit)
    assert any("block_order=torch_sum" in problem.summary for problem in of_a_gpu.problems)


def test_the_engines_own_operators_need_the_feature_too(model: MakeModel) -> None:
    found = look(model(), numerics="rl-bitwise")
    assert found.selection
    assert all(need.features == {"batch_invariant"} for need in found.selection.verdicts)
    assert any(need.operator == "sampling.sample" for need in found.selection.verdicts)


def test_layer_boundaries_follow_the_switch(model: MakeModel) -> None:
    def operators(**options: Any) -> set[str]:
        selection = look(model(), **options).selection
        assert selection
        return {need.operator for need in selection.verdicts}

    assert "norm.add_rms" in operators()
    assert "norm.add_rms" not in operators(layer_boundary_norm="unfused")
    assert "norm.add_rms" not in operators(numerics="rl-bitwise")


def test_all_problems_are_reported_together(model: MakeModel) -> None:
    found = look(
        model(),
        numerics="rl-bitwise",
        tf32=True,
        router_topk="fused",
        trainer="nobody",
        max_model_len=100000,
        kernel="gemm.linear=reference.gemm.linear",
    )
    assert {"conflict", "unknown-value", "pin", "missing-kernel", "size"} <= set(kinds(found.problems))
    assert kinds(found.problems).count("conflict") == 2
    pin = next(problem for problem in found.problems if problem.kind == "pin")
    assert "gemm.linear=reference.gemm.linear" in pin.summary
    assert "batch_invariant" in pin.summary


def test_prepare_refuses_with_every_problem_and_exit_status_2(model: MakeModel) -> None:
    config = load_config(
        {"model": str(model()), "plugins": CORE_AND_MODELS, "numerics": "rl-bitwise", "tf32": True}, environ={}
    )
    with pytest.raises(StartRefused) as caught:
        prepare(config, named_machine("cpu-avx2"))
    assert caught.value.exit_status == 2
    # The weights are missing as well, and that is said at once with the rest.
    assert {"conflict", "missing-kernel", "checkpoint"} <= set(kinds(caught.value.problems))


def test_an_unknown_architecture_is_refused_with_the_installed_ones(model: MakeModel) -> None:
    (problem,) = look(model(architectures=["MambaForCausalLM"])).problems
    assert problem.kind == "profile"
    assert "MambaForCausalLM" in problem.summary
    assert any("tokenspeed-models" in line and "Qwen3ForCausalLM" in line for line in problem.details)
    assert "tokenspeed_models" in problem.remedy


def test_without_model_plugins_the_refusal_says_so(model: MakeModel) -> None:
    (problem,) = look(model(), plugins="tokenspeed-reference").problems
    assert "no model plugin is installed" in problem.details
    assert any("tokenspeed-models" in line and "is disabled" in line for line in problem.details)


def test_without_any_plugin_nothing_is_found_and_all_of_it_is_said(model: MakeModel) -> None:
    assert kinds(look(model(), plugins="none").problems) == ["profile"]
    found = look(model(), plugins="tokenspeed-models")
    assert set(kinds(found.problems)) >= {"missing-kernel", "disabled-plugin"}


def test_a_quantised_checkpoint_needs_a_kernel_that_declares_the_format(model: MakeModel) -> None:
    found = look(model(quantization_config={"quant_method": "fp8"}), numerics="auto")
    (problem,) = found.problems
    assert problem.kind == "missing-kernel"
    assert "gemm.linear" in problem.summary
    assert "weight_format=fp8" in problem.summary
    assert any("reference.gemm.linear" in line and "does not declare weight_format" in line for line in problem.details)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"hidden_size": "wide"}, "hidden_size"), ({"architectures": None}, "architectures"), ({"dtype": "int4"}, "int4")],
)
def test_a_broken_config_is_a_problem_not_a_traceback(model: MakeModel, changes: dict[str, Any], expected: str) -> None:
    (problem,) = look(model(**changes)).problems
    assert problem.kind == "checkpoint"
    assert expected in problem.render()


def test_a_missing_model_is_a_problem(tmp_path: Path) -> None:
    (problem,) = look(tmp_path / "nowhere").problems
    assert problem.kind == "checkpoint"
    assert "nowhere" in problem.summary


def test_a_made_up_gpu_gets_its_own_kernels(model: MakeModel) -> None:
    found = look(model(), machine="sm90")
    assert found.problems == ()
    assert found.selection
    assert {spec.machine.device for spec in found.selection.choices.values()} == {"cuda"}


def test_dtype_is_the_checkpoints_unless_given(model: MakeModel) -> None:
    def dtypes(**options: Any) -> set[str]:
        selection = look(model(), **options).selection
        assert selection
        return {dtype for need in selection.verdicts if need.operator == "gemm.linear" for _, dtype in need.dtypes}

    assert dtypes() == {"bfloat16"}
    assert dtypes(dtype="float32") == {"float32"}
