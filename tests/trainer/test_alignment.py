"""Dumps and `numerics align`: equality is found, differences are found and located, malformed dumps are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tokenspeed.cli.main import cli
from tokenspeed.errors import ConfigError
from tokenspeed.trainer import adopt
from tokenspeed.trainer.record import LAYOUTS, record
from tokenspeed.verify.dump import Dump, read_dump, write_dump

pytestmark = pytest.mark.usefixtures("one_thread")

SEQUENCES = [[5, 90, 17, 44, 101, 33, 7, 250, 61, 9, 12], list(range(20, 57)), [70, 71]]
MANY = [[(7 * row + 3 * column * column) % 317 + 3 for column in range(40)] for row in range(6)]
SMALL = ["--threads", "1", "--num-kv-pages", "64", "--max-model-len", "256", "--max-num-seqs", "8"]

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[str, torch.dtype], Path]) -> Path:
    return make_folder("Qwen3", torch.bfloat16)


@pytest.fixture(scope="module")
def model(folder: Path, load_trainer: Callable[[Path], Any]) -> Any:
    found = load_trainer(folder).eval()
    adopt(found)
    return found


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["numerics", *map(str, words)])


def align(folder: Path, dump: Dump, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report."""
    write_dump(dump, tmp_path / "dump.safetensors")
    done = run("align", folder, "--dump", tmp_path / "dump.safetensors", "--json", *SMALL, *options)
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout)


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    return {one["scenario"]: one["verdict"] for one in report["scenarios"]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_aligns(model: Any, folder: Path, layout: Any, tmp_path: Path) -> None:
    dump = record(model, SEQUENCES, layout=layout, batch_size=2, commit="here", activations=True)
    status, report = align(folder, dump, tmp_path)
    assert status == 0
    assert verdicts(report) == dict.fromkeys(("alone", "packed", "response", "logits"), "holds")
    tokens = sum(map(len, SEQUENCES)) - len(SEQUENCES)
    assert [one["tokens"] for one in report["scenarios"]][:2] == [tokens, tokens]
    assert layout in report["work"]


@pytest.mark.parametrize("trainer", ["megatron", "transformers"])
def test_orders_and_temperature(model: Any, folder: Path, trainer: str, tmp_path: Path) -> None:
    dump = record(model, SEQUENCES, trainer=trainer, temperature=0.6, commit="here")
    assert align(folder, dump, tmp_path)[0] == 0
    other = {"megatron": "transformers", "transformers": "megatron"}[trainer]
    write_dump(dump, tmp_path / "dump.safetensors")
    options = ["--numerics", "rl-bitwise", "--trainer", other]
    refused = run("align", folder, "--dump", tmp_path / "dump.safetensors", *SMALL, *options)
    assert refused.exit_code == 2
    assert f"--trainer {trainer}" in refused.stderr


def test_a_stock_model_is_told_apart_and_located(
    folder: Path, load_trainer: Callable[[Path], Any], tmp_path: Path
) -> None:
    """transformers rounds silu(gate) before it multiplies, which is the first thing that differs."""
    dump = record(load_trainer(folder).eval(), SEQUENCES, commit="here", activations=True)
    status, report = align(folder, dump, tmp_path)
    assert status == 1
    assert verdicts(report) | {"response": "holds"} == {
        "alone": "differs",
        "packed": "differs",
        "response": "holds",
        "logits": "differs",
    }
    (first, *_) = report["scenarios"][0]["findings"]
    assert "request 0: prompt logprob at position 1" in first
    assert "position 0, model.layers.0." in first


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj (gemm.linear)"),
        ("model.layers.2.self_attn.k_norm", "model.layers.2.self_attn.k_norm (norm.rms)"),
        ("model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.v_proj (gemm.linear)"),
        ("model.norm", "model.norm (norm.rms)"),
    ],
)
def test_one_ulp_of_one_weight_is_found_and_located(
    folder: Path, load_trainer: Callable[[Path], Any], name: str, place: str, tmp_path: Path
) -> None:
    changed = load_trainer(folder).eval()
    adopt(changed)
    weight = changed.get_submodule(name).weight
    with torch.no_grad():
        largest = weight.abs().argmax()
        weight.view(torch.int16).view(-1)[largest] += 1
    dump = record(changed, SEQUENCES, commit="here", activations=True)
    status, report = align(folder, dump, tmp_path)
    assert status == 1
    assert any(place in finding for finding in report["scenarios"][0]["findings"]), report["scenarios"][0]["findings"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.0.mlp", "model.layers.1.input_layernorm.input (hidden state + residual)"),
        ("model.layers.2.mlp", "model.norm.input (hidden state + residual)"),
        ("lm_head", "the difference is in lm_head (gemm.linear)"),
    ],
)
def test_what_is_added_or_read_between_recorded_modules_is_located(
    folder: Path, load_trainer: Callable[[Path], Any], name: str, place: str, tmp_path: Path
) -> None:
    """Such as a residual stream that is kept in another precision: the norm behind it is not to be blamed."""
    changed = load_trainer(folder).eval()
    adopt(changed)
    changed.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: output * 1.01)
    dump = record(changed, SEQUENCES, commit="here", activations=True)
    status, report = align(folder, dump, tmp_path)
    assert status == 1
    assert any(place in finding for finding in report["scenarios"][0]["findings"]), report["scenarios"][0]["findings"]


ROUTED = ("Qwen3Moe", "Mixtral", "DeepseekV3", "DeepseekV32", "GlmMoeDsa", "LongcatFlash")


@pytest.fixture(scope="module", params=ROUTED)
def routed(request: pytest.FixtureRequest, make_folder: Callable[[str, torch.dtype], Path]) -> Path:
    return make_folder(request.param, torch.bfloat16)


def test_routed_and_latent_models_align(routed: Path, load_trainer: Callable[[Path], Any], tmp_path: Path) -> None:
    """As trained, and not as transformers computes them; the first difference has a name."""
    trainer = load_trainer(routed).eval()
    stock = record(trainer, SEQUENCES, commit="here", activations=True)
    adopt(trainer)
    dump = record(trainer, SEQUENCES, layout="padded-left", commit="here", activations=True)
    status, report = align(routed, dump, tmp_path)
    assert status == 0
    assert verdicts(report) == dict.fromkeys(("alone", "packed", "response", "logits"), "holds")
    status, report = align(routed, stock, tmp_path)
    assert status == 1
    assert "position 0, model.layers.0." in report["scenarios"][0]["findings"][0]


PLACES = {
    "self_attn.kv_a_proj_with_mqa": "gemm.linear",
    "self_attn.kv_b_proj": "gemm.batched",
    "self_attn.q_a_layernorm": "norm.rms",
    "self_attn.v_proj": "gemm.linear",
    "mlp.gate": "gemm.linear or moe.route",
    "mlp.experts": "moe.experts",
    "mlp.shared_experts.up_proj": "gemm.linear",
    "self_attn.0.q_b_proj": "gemm.linear",
    "self_attn.1.kv_b_proj": "gemm.batched",
    "post_attention_layernorm.1": "norm.rms",
    "mlp.router.classifier": "gemm.linear or moe.route",
    "mlps.0.down_proj": "gemm.linear",
}
"""Modules of a layer, and the operator that is to be blamed when one of their weights is changed."""


def test_one_ulp_of_routed_and_latent_models_is_located(
    routed: Path, load_trainer: Callable[[Path], Any], tmp_path: Path
) -> None:
    at = 1 if "longcat" in routed.name else 2
    tried = 0
    for name, operator in PLACES.items():
        changed = load_trainer(routed).eval()
        adopt(changed)
        try:
            module = changed.get_submodule(f"model.layers.{at}.{name}")
        except AttributeError:
            continue
        tried += 1
        weight = next(tensor for own, tensor in module.named_parameters() if own in ("weight", "down_proj"))
        # A router that computes in fp32 is widened to fp32, and one unit there drowns in a model of bf16.
        bits, units = (torch.int16, 1) if weight.dtype == torch.bfloat16 else (torch.int32, 1 << 16)
        with torch.no_grad():
            weight.view(bits).view(-1)[weight.abs().argmax()] += units
        status, report = align(routed, record(changed, MANY, commit="here", activations=True), tmp_path)
        assert status == 1, name
        finding = report["scenarios"][0]["findings"][0]
        assert f"model.layers.{at}." in finding, (name, finding)
        assert f"({operator}" in finding, (name, finding)
    assert tried >= 3


def test_one_logprob_of_one_position_is_found(model: Any, folder: Path, tmp_path: Path) -> None:
    dump = record(model, SEQUENCES, commit="here", activations=True)
    logprob = dump.sequences[1].logprob.clone()
    logprob.view(torch.int32)[20] ^= 1
    sequences = [*dump.sequences]
    sequences[1] = replace(sequences[1], logprob=logprob)
    status, report = align(folder, replace(dump, sequences=sequences), tmp_path)
    assert status == 1
    (finding,) = report["scenarios"][0]["findings"]
    assert "request 1: prompt logprob at position 21" in finding
    assert "recorded activations agree" in finding


def test_a_false_report_is_found(model: Any, folder: Path, tmp_path: Path) -> None:
    """The rider: what was reported while generating must be what teacher forcing gives."""
    dump = record(model, SEQUENCES, commit="here")
    reported = dump.sequences[1].logprob[29:].clone()
    honest = replace(dump.sequences[1], prompt_length=30, reported=reported)
    assert align(folder, replace(dump, sequences=[honest]), tmp_path)[0] == 0
    reported.view(torch.int32)[2] += 1
    status, report = align(folder, replace(dump, sequences=[honest]), tmp_path)
    assert status == 1
    assert verdicts(report)["response"] == "differs"
    assert "logprob at position 32" in report["scenarios"][2]["findings"][0]


def test_dump_command(folder: Path, tmp_path: Path) -> None:
    """The whole way by the command line, with the engine's own continuations and what it reported for them."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a fox"}\n{"token_ids": [5, 6, 7]}\n')
    out = tmp_path / "d.safetensors"
    options = ["--prompts", tmp_path / "prompts.jsonl", "-o", out, "--generate", "12", "--threads", "1"]
    done = run("dump", folder, *options, "--max-model-len", "128", "--layout", "packed", "--activations")
    assert done.exit_code == 0, done.output
    found = read_dump(out)
    assert [sequence.prompt_length for sequence in found.sequences] == [5, 3]
    assert [len(sequence.ids) for sequence in found.sequences] == [17, 15]
    assert "model.layers.2.mlp.down_proj.input" in found.sequences[0].activations
    assert "transformers" in found.commit
    assert run("align", folder, "--dump", out, *SMALL).exit_code == 0
    stock = run("dump", folder, *options, "--stock", "--max-model-len", "128")
    assert stock.exit_code == 0
    shown = run("align", folder, "--dump", out, *SMALL)
    assert shown.exit_code == 1
    assert "the dump has no activations" in shown.stdout


def test_dump_command_refuses_a_single_token(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"token_ids": [5, 6]}\n{"token_ids": [5]}\n')
    refused = run("dump", folder, "--prompts", tmp_path / "prompts.jsonl", "-o", tmp_path / "d.safetensors")
    assert refused.exit_code == 1
    assert "line 2: one token alone has no log-probability" in refused.stderr


class TestMalformed:
    """A dump that is not as the schema says is refused, with the field."""

    @pytest.fixture
    def file(self, model: Any, tmp_path: Path) -> Path:
        write_dump(record(model, SEQUENCES[:2], commit="here"), tmp_path / "d.safetensors")
        return tmp_path / "d.safetensors"

    def damaged(self, file: Path, tensors: Tensors, metadata: dict[str, str]) -> str:
        with safe_open(file, framework="pt") as opened:
            before = opened.metadata()
        whole = {**load_file(file), **tensors}
        kept = {key: value for key, value in {**before, **metadata}.items() if value}
        save_file({name: tensor for name, tensor in whole.items() if tensor.numel()}, file, kept)
        with pytest.raises(ConfigError) as refusal:
            read_dump(file, vocab_size=320)
        return str(refusal.value)

    @pytest.mark.parametrize(
        ("tensors", "metadata", "message"),
        [
            ({}, {"schema": "other"}, "metadata schema is 'other', expected 'tokenspeed/dump@1'"),
            ({}, {"layout": ""}, "metadata layout is missing"),
            ({}, {"colour": "red"}, "metadata colour is unknown"),
            ({}, {"temperature": "warm"}, "metadata temperature is 'warm'"),
            ({"sequences.0.ids": torch.empty(0)}, {}, "sequences.0.ids is missing, expected int64[T]"),
            ({"sequences.0.ids": torch.ones(11)}, {}, "sequences.0.ids is float32[11], expected int64[T]"),
            ({"sequences.0.ids": torch.full((11,), 320)}, {}, "sequences.0.ids holds 320"),
            ({"sequences.1.logprob": torch.ones(7)}, {}, "sequences.1.logprob is float32[7], expected float32[36]"),
            ({"sequences.1.logprob": torch.ones(36).double()}, {}, "sequences.1.logprob is float64[36]"),
            ({"sequences.0.logits": torch.ones(9, 320)}, {}, "sequences.0.logits is [9, 320]"),
            ({"sequences.0.reported": torch.ones(3)}, {}, "sequences.0.prompt_length is missing"),
            (
                {"sequences.0.prompt_length": torch.tensor([11])},
                {},
                "sequences.0.prompt_length is 11, expected 1 to 10",
            ),
            ({"sequences.0.activations.model.norm": torch.ones(4, 96)}, {}, "model.norm is [4, 96], expected [11,F]"),
            ({"sequences.0.color": torch.ones(1)}, {}, "tensor sequences.0.color is unknown"),
            ({"sequences.7.ids": torch.ones(3)}, {}, "sequences are numbered [0, 1, 7]"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_fields(self, file: Path, tensors: Tensors, metadata: dict[str, str], message: str) -> None:
        assert message in self.damaged(file, tensors, metadata)

    def test_no_safetensors(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"not a dump")
        refused = run("align", folder, "--dump", tmp_path / "x", *SMALL)
        assert refused.exit_code == 2
        assert "no readable safetensors file" in refused.stderr
