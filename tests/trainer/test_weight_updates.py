"""Exchanging weights in process: all or nothing, and nothing old is read again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenspeed import LLM, SamplingParams
from tokenspeed.engine.request import Request
from tokenspeed.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [5, 90, 17, *range(20, 60)]
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True, logprobs=0)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[str, torch.dtype], Path]) -> Path:
    return make_folder("Qwen3", torch.bfloat16)


def start(folder: Path) -> LLM:
    sizes = {"threads": 1, "num_kv_pages": 64, "max_num_seqs": 8, "max_model_len": 256}
    return LLM(folder, numerics="rl-bitwise", **sizes)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with start(folder) as found:
        yield found


@pytest.fixture
def changed(folder: Path) -> Tensors:
    """The checkpoint's tensors, every one of them different."""
    return {name: tensor * 0.75 for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.fixture
def changed_folder(changed: Tensors, tmp_path: Path) -> Path:
    """Weights alone, without a configuration."""
    save_file(changed, tmp_path / "model.safetensors")
    return tmp_path


def reply(llm: LLM) -> tuple[list[int], list[float]]:
    output = llm.generate(PROMPT, PARAMS)[0].outputs[0]
    assert output.logprobs is not None
    return output.token_ids, [
        entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)
    ]


def complete(folder: Path, tensors: Tensors, into: Path) -> Path:
    """A whole checkpoint with these weights."""
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (into / file.name).write_bytes(file.read_bytes())
    save_file(tensors, into / "model.safetensors")
    return into


def test_replies_are_those_of_an_engine_started_with_the_new_weights(
    llm: LLM, folder: Path, changed: Tensors, changed_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    old, old_print = reply(llm), llm.engine.fingerprint
    with start(complete(folder, changed, tmp_path_factory.mktemp("fresh"))) as fresh:
        expected, expected_print = reply(fresh), fresh.engine.fingerprint
    assert llm.update_weights(changed_folder, "one") == "one" == llm.engine.weight_version
    assert reply(llm) == expected != old
    assert llm.engine.fingerprint == expected_print != old_print
    assert llm.update_weights(load_file(folder / "model.safetensors").items()) != "one"
    assert reply(llm) == old
    assert llm.engine.fingerprint == old_print
    assert (
        llm.update_weights(changed) == llm.update_weights(iter(changed.items())) == llm.update_weights(changed_folder)
    )
    assert reply(llm) == expected


@pytest.fixture(params=["Qwen3Moe", "Mixtral", "DeepseekV3", "DeepseekV32", "GlmMoeDsa", "LongcatFlash"])
def routed(request: pytest.FixtureRequest, make_folder: Callable[[str, torch.dtype], Path]) -> Path:
    return make_folder(request.param, torch.bfloat16)


def test_stacked_experts_are_those_of_a_checkpoint(
    routed: Path, load_trainer: Callable[[Path], Any], tmp_path: Path
) -> None:
    """A trainer's tensors in process = the same model saved, in another engine and at another start."""
    trainer = load_trainer(routed)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(0.75)
    trainer.save_pretrained(tmp_path)
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((routed / file).read_bytes())
    held = dict(trainer.state_dict())
    stacked = [name for name, tensor in held.items() if name.endswith("experts.gate_up_proj") and tensor.dim() == 3]
    stored = load_file(tmp_path / "model.safetensors")
    assert stacked
    assert not stored.keys() & set(stacked)
    with start(tmp_path) as fresh:
        expected = reply(fresh), fresh.engine.fingerprint, fresh.engine.weight_version
    with start(routed) as llm:
        old = reply(llm), llm.engine.fingerprint, llm.engine.weight_version
        for source in (held.items(), tmp_path, stored.items()):
            llm.update_weights(source)
            assert (reply(llm), llm.engine.fingerprint, llm.engine.weight_version) == expected != old
            llm.update_weights(routed)
            assert (reply(llm), llm.engine.fingerprint, llm.engine.weight_version) == old
        name = stacked[0]
        with pytest.raises(CheckpointError, match=re.escape(f"{name} is [3, ")):
            llm.update_weights((held | {name: held[name][:3]}).items())
        with pytest.raises(CheckpointError, match=r"missing .*\n +model\.layers\..*experts\.0\."):
            llm.update_weights(pair for pair in held.items() if pair[0] != name)
        with pytest.raises(CheckpointError, match="given twice"):
            llm.update_weights([*held.items(), (name, held[name])])
        assert (reply(llm), llm.engine.fingerprint, llm.engine.weight_version) == old


def test_cached_prefixes_are_forgotten(llm: LLM, changed: Tensors) -> None:
    reply(llm)
    assert llm.generate(PROMPT, PARAMS)[0].num_cached_tokens == 32
    llm.update_weights(changed.items())
    assert llm.generate(PROMPT, PARAMS)[0].num_cached_tokens == 0


def test_a_running_request_goes_on_with_the_new_weights(llm: LLM, folder: Path, changed: Tensors) -> None:
    """What it has is kept; what follows is what the new weights continue it with."""
    engine = llm.engine
    engine.add(Request(id="a", prompt=PROMPT, params=PARAMS, seed=3))
    before = [update.token_ids[0] for _ in range(9) for update in engine.step() if update.token_ids]
    engine.install_weights(engine.stage_weights(changed.items()), "two")
    after, versions = [], set()
    while engine.has_work:
        for update in engine.step():
            after += update.token_ids
            versions.add(update.weight_version)
            assert update.preemptions == 1
    assert versions == {"two"}
    assert len(before) + len(after) == 24
    rest = SamplingParams(max_tokens=len(after), temperature=1.0, seed=3, ignore_eos=True)
    assert llm.generate(PROMPT + before, rest)[0].outputs[0].token_ids == after


def test_abort_all(llm: LLM) -> None:
    for name in ("a", "b"):
        llm.engine.add(Request(id=name, prompt=PROMPT, params=PARAMS, seed=3))
    llm.engine.step()
    updates = llm.engine.abort_all()
    assert [(update.id, update.finish_reason) for update in updates] == [("a", "abort"), ("b", "abort")]
    assert not llm.engine.has_work


def drop(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from (item for item in tensors.items() if item[0] != "model.layers.1.self_attn.k_proj.weight")


def misshape(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from (tensors | {"model.norm.weight": torch.ones(7, dtype=torch.bfloat16)}).items()


def add(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from (tensors | {"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}).items()


def repeat(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        yield name, tensors[name]


def integers(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from (tensors | {"model.norm.weight": torch.ones(96, dtype=torch.int8)}).items()


def breaks(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(tensors.items())[:9]
    raise ConnectionError("the trainer is gone")


class Distributed(torch.Tensor):
    """As `fully_shard` keeps a parameter."""

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "not NoneType"),
        (5, "not int"),
        ([5], "one is 5"),
        ([("lm_head.weight",)], r"one is \('lm_head.weight',\)"),
        ({"lm_head.weight": 1.0}, r"one is \('lm_head.weight', 1.0\)"),
        ({"lm_head.weight": torch.empty(320, 96, device="meta")}, "lm_head.weight is on the meta device"),
        ({"lm_head.weight": torch.zeros(320, 96).to_sparse()}, "lm_head.weight is a torch.sparse_coo tensor"),
        ({"lm_head.weight": torch.zeros(320, 96).as_subclass(Distributed)}, "distributed tensor; gather it first"),
    ],
)
def test_what_holds_no_weights_is_refused(llm: LLM, source: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        llm.update_weights(source)


@pytest.mark.parametrize(
    ("damage", "kind", "reason"),
    [
        (drop, CheckpointError, r"missing \(1\):\n +model.layers.1.self_attn.k_proj.weight"),
        (misshape, CheckpointError, r"model.norm.weight is \[7\], the model wants \[96\]"),
        (add, CheckpointError, r"unexpected \(1\):\n +model.layers.9.mlp.up_proj.weight"),
        (repeat, CheckpointError, r"given twice \(2\):\n +model.*\n +model"),
        (integers, CheckpointError, r"model.norm.weight is torch.int8"),
        (breaks, ConnectionError, "the trainer is gone"),
    ],
)
def test_a_failing_update_changes_nothing(
    llm: LLM, changed: Tensors, damage: Callable[[Tensors], Any], kind: type[Exception], reason: str
) -> None:
    old, version, fingerprint = reply(llm), llm.engine.weight_version, llm.engine.fingerprint
    with pytest.raises(kind, match=reason):
        llm.update_weights(damage(changed))
    assert reply(llm) == old
    assert (llm.engine.weight_version, llm.engine.fingerprint) == (version, fingerprint)


def test_folders_that_are_refused(
    llm: LLM, changed: Tensors, tmp_path: Path, make_folder: Callable[[str, torch.dtype], Path]
) -> None:
    old = reply(llm)
    with pytest.raises(CheckpointError, match="is no folder"):
        llm.update_weights(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors"):
        llm.update_weights(tmp_path)
    with pytest.raises(CheckpointError, match="holds a LlamaForCausalLM, the engine runs a Qwen3ForCausalLM"):
        llm.update_weights(make_folder("Llama", torch.bfloat16))
    save_file(dict(list(changed.items())[3:]), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing \(3\)"):
        llm.update_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="no readable safetensors"):
        llm.update_weights(tmp_path)
    assert reply(llm) == old


def test_other_dtypes_are_converted(llm: LLM, changed: Tensors) -> None:
    llm.update_weights(changed.items())
    expected = reply(llm)
    llm.update_weights((name, tensor.float()) for name, tensor in changed.items())
    assert reply(llm) == expected
