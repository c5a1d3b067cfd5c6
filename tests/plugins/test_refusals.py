"""What bad plugins do to a start: the refusal names them, and none of them can get around a promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config_sources import load_config
from tokenspeed.errors import StartRefused
from tokenspeed.machine import named_machine
from tokenspeed.startup import Examination, examine, launch, prepare

BASE = ["tokenspeed-reference", "tokenspeed-models"]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "dtype": "bfloat16",
}


def look(folder: Any, *plugins: str, architecture: str = "LlamaForCausalLM", **options: Any) -> Examination:
    path = folder.path / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture]}))
    config = load_config({"model": str(path), "plugins": [*BASE, *plugins], **options}, environ={})
    return examine(config, named_machine("cpu-avx2"), weights=False)


def test_a_plugin_that_failed_to_import_is_named_by_the_refusal_it_could_have_prevented(folder: Any) -> None:
    folder.install("acme-kernels", "import libacme_cuda")
    found = look(folder, "acme-kernels", numerics="rl-bitwise")
    (problem,) = (problem for problem in found.problems if problem.kind == "broken-plugin")
    assert problem.summary == (
        "plugin acme-kernels (acme-kernels 1.2.3) is broken: ModuleNotFoundError: No module named 'libacme_cuda'"
    )
    assert "gemm.linear" in problem.details[0]


def test_a_broken_plugin_does_not_refuse_a_start_that_does_not_need_it(folder: Any) -> None:
    folder.install("acme-kernels", "import libacme_cuda")
    assert look(folder, "acme-kernels").problems == ()


def test_a_broken_model_plugin_is_named_when_the_architecture_is_unknown(folder: Any) -> None:
    folder.install("acme-models", "import transformers_of_the_future")
    (problem,) = look(folder, "acme-models", architecture="AcmeForCausalLM").problems
    assert any("acme-models 1.2.3" in line and "transformers_of_the_future" in line for line in problem.details)


def test_a_profile_that_does_not_list_the_envelope_is_refused(folder: Any) -> None:
    folder.install(
        "acme-models",
        """
        @hookimpl
        def tokenspeed_models():
            return [ModelProfile("AcmeForCausalLM", "tokenspeed_models.llama:LlamaForCausalLM")]
        """,
    )
    found = look(folder, "acme-models", architecture="AcmeForCausalLM", numerics="rl-bitwise")
    (problem,) = (problem for problem in found.problems if problem.kind == "profile")
    assert problem.summary == (
        "--numerics rl-bitwise was given, and the profile of AcmeForCausalLM (acme-models 1.2.3) lists auto"
    )
    assert any("numerics verify --full" in line for line in problem.details)
    assert look(folder, "acme-models", architecture="AcmeForCausalLM").problems == ()


def test_a_model_class_that_is_not_there_is_refused(folder: Any) -> None:
    folder.install(
        "acme-models",
        "@hookimpl\ndef tokenspeed_models(): return [ModelProfile('AcmeForCausalLM', 'acme_models:Missing')]",
    )
    (problem,) = look(folder, "acme-models", architecture="AcmeForCausalLM").problems
    assert problem.kind == "broken-plugin"
    assert "acme-models 1.2.3" in problem.summary


def test_two_distributions_with_one_kernel_name_refuse_any_start(folder: Any) -> None:
    for name in ("left-kernels", "right-kernels"):
        folder.install(name, "@hookimpl\ndef tokenspeed_kernels(): return [kernel('same', 'norm.rms')]")
    (problem,) = look(folder, "left-kernels", "right-kernels").problems
    assert problem.kind == "plugin-clash"
    assert problem.summary == "kernel same is claimed by left-kernels 1.2.3 and by right-kernels 1.2.3"


def test_priority_of_a_plugin_does_not_outrank_a_promise(folder: Any) -> None:
    folder.install(
        "loud-kernels",
        "@hookimpl\ndef tokenspeed_kernels(): return [kernel('loud', priority=10**6)]",
    )
    found = look(folder, "loud-kernels", numerics="rl-bitwise")
    assert found.selection
    assert "loud" not in {spec.name for spec in found.selection.choices.values()}
    assert any("loud (loud-kernels 1.2.3): rejected" in problem.render() for problem in found.problems)


def test_an_over_promising_kernel_is_chosen_and_its_distribution_is_on_record(folder: Any) -> None:
    """Selection trusts what a kernel declares; who declared it is in the plan, and verification tests the claim."""
    folder.install(
        "boasting-kernels",
        """
        @hookimpl
        def tokenspeed_kernels():
            return [kernel("boast", features=frozenset({"batch_invariant"}), priority=Priority.PLUGIN)]
        """,
    )
    found = look(folder, "boasting-kernels", numerics="rl-bitwise")
    assert found.selection
    chosen = {need.operator: spec for need, spec in found.selection.choices.items()}
    assert (chosen["gemm.linear"].name, chosen["gemm.linear"].distribution) == ("boast", "boasting-kernels")


def test_a_function_that_is_not_there_is_refused_before_weights_are_read(
    folder: Any, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenspeed.loading.checkpoint import Checkpoint

    monkeypatch.setattr(Checkpoint, "load", lambda *_args, **_kwargs: pytest.fail("weights were read"))
    folder.install(
        "hollow-kernels",
        """
        def kernels_here(): ...

        @hookimpl
        def tokenspeed_kernels():
            sig = ({"x": "float32", "weight": "float32"},)
            return [kernel("hollow", target="hollow_kernels:linear", signatures=sig, priority=Priority.PLUGIN)]
        """,
    )
    path: Path = make_checkpoint("Qwen3")
    prepared = prepare(load_config({"model": str(path), "plugins": [*BASE, "hollow-kernels"]}, environ={}))
    with pytest.raises(StartRefused) as caught:
        launch(prepared)
    (problem,) = caught.value.problems
    assert problem.kind == "broken-kernel"
    assert "kernel hollow of hollow-kernels 1.2.3 was chosen for gemm.linear" in problem.summary
    assert "module 'hollow_kernels' has no attribute 'linear'" in problem.details[0]
