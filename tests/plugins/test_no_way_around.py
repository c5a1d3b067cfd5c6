"""Each refusal names what it must, and nothing gets around it: variable, file, pin, priority, plugin, late setting.

The cases are those of docs/reference/refusals.md (`scripts/refusals.py`); `tests/docs` compares the page itself.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import refusals
from tokenspeed import LLM, __version__
from tokenspeed.config_sources import load_config
from tokenspeed.errors import ConfigError, StartRefused
from tokenspeed.numerics.switches import SWITCHES
from tokenspeed.startup import prepare

MUST_NAME = {
    "No kernel keeps the promise": ["gemm.linear", "bfloat16", "avx2", "batch_invariant", "tokenspeed[aok]"],
    "The kernel is in a plugin that cannot be imported": ["acme-broken 1.2.3", "No module named 'libacme_cuda'"],
    "The kernel is in a plugin that was switched off": ["tokenspeed-kernels-aok", "--plugins"],
    "Experts are not combined in slot order": ["moe.experts", "combine_order=slot", "combine_order=rank", "acme.moe"],
    "Experts are split over ranks": ["--tensor-parallel-size 2", "--moe-combine-order slot", "-size 1"],
    "The model is not verified for the envelope": [
        "AcmeForCausalLM",
        "lists auto",
        "to numerics_envelopes",
        "verify --full",
    ],
    "Nobody supports the architecture": ["MambaForCausalLM", "Qwen3ForCausalLM", "tokenspeed_models"],
    "A quantised checkpoint, and no kernel for its format": ["fp8", "gemm.linear", "aok.gemm.linear"],
    "An unknown trainer": ["nobody", "megatron", "transformers"],
    "A trainer without a promise": ["--trainer megatron", "auto"],
    "A pinned kernel that does not keep the promise": ["reference.gemm.linear", "batch_invariant"],
    "A plugin's priority": ["acme.linear (acme-loud 1.2.3): rejected", "batch_invariant"],
    "An environment variable": ["environment variable TOKENSPEED_TF32", "--no-tf32"],
    "An environment variable that a library reads": ["NCCL_ALGO=Tree", "--collectives ordered", "unset NCCL_ALGO"],
    "Too little memory on the GPU": ["79.00 GiB free", "100.00 GiB", "--kv-cache-memory"],
    "A configuration file": ["router_topk in serve.yaml", "--router-topk torch"],
    "An escape hatch": ["TOKENSPEED_TRUST_KERNELS", "no such option"],
    "An unknown envelope": ["bitwise", "auto, rl-bitwise"],
}


@pytest.fixture(scope="module")
def made_up() -> Iterator[Path]:
    """The made-up plugins and models of the page."""
    with refusals.made_up_plugins() as folder:
        yield folder


@pytest.mark.parametrize("case", refusals.CASES, ids=lambda case: case.title)
def test_the_message_names_both_sides_and_the_way_out(case: refusals.Case, made_up: Path) -> None:
    text = "\n".join(refusals.messages(case, made_up))
    for phrase in MUST_NAME[case.title]:
        assert phrase in text, f"{phrase!r} is not in:\n{text}"
    if text.startswith("["):
        assert "    -> " in text


@pytest.mark.parametrize("case", list(refusals.conflict_cases()), ids=lambda case: case.title)
def test_every_switch_conflicts_with_flag_values_and_promise(case: refusals.Case, made_up: Path) -> None:
    (text,) = refusals.messages(case, made_up)
    ((name, value),) = case.options.items()
    assert text.startswith(f"[conflict] {SWITCHES[name].spelled(value)} ")
    assert "was given, but --numerics rl-bitwise needs --" in text
    assert "it would break the promise: " in text


def test_there_is_a_case_for_every_switch() -> None:
    assert {name for case in refusals.conflict_cases() for name in case.options} == set(SWITCHES)


@pytest.mark.parametrize("source", ["environment", "file", "argument"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_loose_value_conflicts_wherever_it_is_written(source: str, switch: str, made_up: Path) -> None:
    (loose,) = (case.options for case in refusals.conflict_cases() if switch in case.options)
    value = str(loose[switch])
    case = refusals.Case(
        "",
        "",
        options={switch: value} if source == "argument" else {},
        environ={f"TOKENSPEED_{switch.upper()}": value} if source == "environment" else {},
        yaml=f"{switch}: {value!r}\n" if source == "file" else "",
        kinds=("conflict",),
    )
    (text,) = refusals.messages(case, made_up)
    assert text.startswith("[conflict]")
    assert "environment variable" in text or source != "environment"
    assert "in serve.yaml" in text or source != "file"


def test_the_file_does_not_outrank_the_envelope_of_the_command_line(made_up: Path) -> None:
    case = refusals.Case("", "", yaml="numerics: auto\ntf32: true\n", kinds=("conflict",))
    assert len(refusals.messages(case, made_up)) == 1


def test_a_trainer_profile_cannot_loosen_what_the_envelope_promises() -> None:
    from tokenspeed.numerics.envelopes import BUILTIN_TRAINERS, trainer_faults

    loose = dataclasses.replace(BUILTIN_TRAINERS[0], name="mine", tight={**BUILTIN_TRAINERS[0].tight, "autotune": "on"})
    assert trainer_faults(loose) == ["trainer profile mine: autotune is not a trainer switch"]


@pytest.mark.parametrize(("asked", "message"), list(refusals.refused_requests()), ids=lambda value: str(value)[:40])
def test_a_request_without_a_bitwise_meaning_is_400(asked: str, message: str) -> None:
    assert message.startswith("400: ")


def test_a_refused_start_loads_nothing_and_ends_with_2(tiny_qwen3: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPEED_")}
    command = [sys.executable, "-m", "tokenspeed", "serve", str(tiny_qwen3), "--numerics", "rl-bitwise", "--port", "0"]
    done = subprocess.run(
        command, env={**environ, "TOKENSPEED_AUTOTUNE": "on"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "[conflict] --autotune was given (environment variable TOKENSPEED_AUTOTUNE)" in done.stderr
    assert "loading weights" not in done.stdout + done.stderr
    assert "serving on" not in done.stdout


@pytest.fixture(scope="module")
def plan(tiny_qwen3: Path) -> Any:
    """A plan under the envelope."""
    return prepare(load_config({"model": str(tiny_qwen3), "numerics": "rl-bitwise"}, environ={})).plan


def test_nothing_is_set_late(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, name, value in (
        (plan, "numerics", None),
        (plan.numerics, "envelope", "auto"),
        (plan.numerics, "features", frozenset()),
        (plan.machine, "isa", frozenset()),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, value)
    with pytest.raises(TypeError):
        plan.numerics.switches["tf32"] = "on"
    with pytest.raises(TypeError):
        plan.choices[next(iter(plan.choices))] = None
    config = load_config({"numerics": "rl-bitwise"}, environ={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.numerics = "auto"  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.switches["tf32"] = "on"  # type: ignore[index]
    before = dict(plan.numerics.switches)
    monkeypatch.setenv("TOKENSPEED_TF32", "on")
    assert dict(plan.numerics.switches) == before


def test_no_route_changes_numerics() -> None:
    from typing import cast

    from tokenspeed.server.app import create_app
    from tokenspeed.server.service import Service

    with warnings.catch_warnings():
        # A route with two methods has one operation id for both.
        warnings.filterwarnings("ignore", "Duplicate Operation ID")
        paths = create_app(cast(Service, None)).openapi()["paths"]
    assert set(paths["/numerics"]) <= {"get", "head"}
    assert not [path for path in paths if any(word in path for word in ("switch", "kernel", "envelope", "plugin"))]


@pytest.mark.parametrize("option", ["trust_kernels", "force", "skip_checks", "unsafe", "allow_variant"])
def test_python_has_no_escape_hatch_either(option: str, tiny_qwen3: Path) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{option}'"):
        LLM(tiny_qwen3, numerics="rl-bitwise", **{option: True})


def test_testing_variables_change_no_choice_and_are_shown(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"model": str(tiny_qwen3), "numerics": "rl-bitwise"}, environ={})
    plain = prepare(config).plan
    monkeypatch.setenv("TOKENSPEED_AOK_ISA", "avx2")
    forced = prepare(config).plan
    assert forced.digest == plain.digest
    assert any("TOKENSPEED_AOK_ISA=avx2" in note for note in forced.notes)
    with pytest.raises(ConfigError, match="TOKENSPEED_AOK_IST"):
        load_config({}, environ={"TOKENSPEED_AOK_IST": "avx2"})


def test_a_pin_of_a_kernel_without_the_feature_is_refused_in_python(tiny_qwen3: Path) -> None:
    with pytest.raises(StartRefused, match=r"reference\.norm\.rms cannot serve"):
        LLM(tiny_qwen3, numerics="rl-bitwise", kernel={"norm.rms": "reference.norm.rms"})


def test_messages_are_those_of_this_version(made_up: Path) -> None:
    (text, *_) = refusals.messages(refusals.CASES[0], made_up)
    assert f"(tokenspeed {__version__})" in text
