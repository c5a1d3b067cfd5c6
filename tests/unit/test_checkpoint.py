"""Reading checkpoints: what is wrong is named, all of it, and nothing is loaded halfway."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from tokenspeed.errors import CheckpointError
from tokenspeed.layers.context import LayerContext
from tokenspeed.loading.checkpoint import Checkpoint
from tokenspeed.loading.weight_file import WeightFile
from tokenspeed.models.base import CausalLM
from tokenspeed.testing.models import bind_kernels
from tokenspeed.tokenizer import Tokenizer
from tokenspeed_models.qwen3 import Qwen3ForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")


def build(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> CausalLM:
    ctx = LayerContext(dtype)
    model = Qwen3ForCausalLM(checkpoint.config, ctx)
    bind_kernels(ctx)
    return model


@pytest.fixture
def folder(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def load(folder: Path) -> CausalLM:
    checkpoint = Checkpoint(folder)
    model = build(checkpoint)
    checkpoint.load(model)
    return model


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load(folder)
    return str(error.value)


def test_every_weight_arrives(folder: Path) -> None:
    """Progress ends at the total; merged weights hold their parts in order."""
    checkpoint = Checkpoint(folder)
    model = build(checkpoint)
    heard: list[tuple[int, int]] = []
    checkpoint.load(model, progress=lambda done, total: heard.append((done, total)))
    stored = load_file(folder / "model.safetensors")
    assert heard[-1] == (sum(t.nbytes for t in stored.values()),) * 2
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    attention = "model.layers.1.self_attn"
    merged = torch.cat([stored[f"{attention}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(model.get_submodule(f"{attention}.qkv_proj").packed, merged)  # type: ignore[arg-type]


def test_missing_unexpected_and_misshaped_tensors_are_reported_together(folder: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.k_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.1.mlp.gate_proj.weight"] = torch.zeros(7, 96)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float64)

    rewrite(folder, damage)
    message = refusal(folder)
    for words in (
        "missing (2):",
        "model.norm.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "unexpected (1):",
        "model.layers.9.mlp.up_proj.weight",
        "mis-shaped (1):",
        "model.layers.1.mlp.gate_proj.weight is [7, 96], the model wants [160, 96]",
        "unreadable (1):",
        "model.embed_tokens.weight is F64",
        str(folder),
    ):
        assert words in message


def test_a_long_list_is_counted(folder: Path) -> None:
    rewrite(folder, dict.clear)
    message = refusal(folder)
    assert "missing (35)" in message
    assert "and 15 more" in message


def test_a_tied_checkpoint_may_carry_the_head_too(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(320, 96)}))
    model = load(folder)
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.get_submodule("lm_head").packed, stored)  # type: ignore[arg-type]


def test_an_untied_checkpoint_must_carry_the_head(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    assert "lm_head.weight" in refusal(folder)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    message = refusal(folder)
    assert "pickle" in message
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -1000])
def test_truncated_files(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(folder)
    assert "truncated or corrupt" in message
    assert str(path) in message


def test_a_corrupt_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[20:40] = b"\xff" * 20
    path.write_bytes(data)
    assert "truncated or corrupt" in refusal(folder)


def shard(folder: Path) -> dict[str, str]:
    """Split the one file of `folder` in two; the index's weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{1 + (i % 2)}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return files


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "generation_config.json", "config.json"]
)
def test_a_link_that_leads_nowhere_is_no_missing_file(folder: Path, name: str) -> None:
    """As in a cache whose contents were removed: without the file the model would be another one, in silence."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../blobs/4f2a")

    def read_everything() -> None:
        checkpoint = Checkpoint(folder)
        checkpoint.load(build(checkpoint))
        assert checkpoint.eos_token_ids

    with pytest.raises(CheckpointError, match=f"{name} .*No such file or directory"):
        read_everything()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_a_link_of_a_tokenizer_that_leads_nowhere(folder: Path, name: str) -> None:
    Backend(WordLevel({"a": 0}, "a")).save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_directory(folder).chat_template is None
    (folder / name).symlink_to("../blobs/4f2a")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: .* \(it is a link to \.\./blobs/4f2a\)"):
        Tokenizer.from_directory(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_does_not_make_the_start_wait_for_its_writer(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: no regular file"):
        _ = Checkpoint(folder).eos_token_ids


def test_shards_that_split_a_merged_weight(folder: Path) -> None:
    whole = load(folder)
    shard(folder)
    split = load(folder)
    for (name, one), (_, other) in zip(whole.weight_layers(), split.weight_layers(), strict=True):
        packed = getattr(one, "packed", None)
        if packed is not None:
            assert torch.equal(packed, other.packed), name  # type: ignore[arg-type]


def test_a_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-2.safetensors").unlink()
    message = refusal(folder)
    assert "model-2.safetensors" in message
    assert "not here" in message


def test_an_index_may_not_point_outside(folder: Path) -> None:
    files = shard(folder)
    shutil.move(folder / "model-2.safetensors", folder.parent / "model-2.safetensors")
    moved = {name: file.replace("model-2", "../model-2") for name, file in files.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": moved}))
    assert "not here" in refusal(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    shard(folder)
    shutil.copy(folder / "model-1.safetensors", folder / "model-2.safetensors")
    assert "is in both" in refusal(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": 1}}', "{"])
def test_a_malformed_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not valid JSON"), ("[1]", "JSON object, not list"), (None, "cannot be read")]
)
def test_malformed_configs(folder: Path, text: str | None, words: str) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    message = refusal(folder)
    assert words in message
    assert "config.json" in message


@pytest.mark.parametrize("architectures", [None, [], ["A", "B"], "Qwen3ForCausalLM"])
def test_architectures(folder: Path, architectures: object) -> None:
    edit_config(folder, architectures=architectures)
    with pytest.raises(CheckpointError, match="should name one architecture"):
        _ = Checkpoint(folder).architecture


def test_dtypes(folder: Path) -> None:
    assert Checkpoint(folder).dtype == torch.float32
    edit_config(folder, dtype=None, torch_dtype="bfloat16")
    assert Checkpoint(folder).dtype == torch.bfloat16
    edit_config(folder, dtype="float8_e4m3fn")
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        _ = Checkpoint(folder).dtype


@pytest.mark.parametrize(
    ("in_generation", "in_config", "expected"), [([5, 7], 1, {5, 7}), (None, 3, {3}), (None, None, set()), (0, 4, {0})]
)
def test_eos_token_ids(folder: Path, in_generation: object, in_config: object, expected: set[int]) -> None:
    edit_config(folder, eos_token_id=in_config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert Checkpoint(folder).eos_token_ids == expected


def test_a_malformed_eos_token(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match="</s>"):
        _ = Checkpoint(folder).eos_token_ids


def test_one_layer_at_a_time_is_packed_and_its_original_freed(folder: Path) -> None:
    """While loading, at most a layer's worth of unpacked weights exists: what is not packed yet has no memory."""
    checkpoint = Checkpoint(folder)
    model = build(checkpoint)
    most = 0

    def watch(done: int, total: int) -> None:
        nonlocal most
        del done, total
        allocated = [p.nbytes for p in model.parameters() if not p.is_meta and p.dim() > 1]
        most = max(most, sum(allocated))

    checkpoint.load(model, progress=watch)
    largest = max(stored.num_bytes for stored in checkpoint.tensors.values())
    assert 0 < most <= 4 * largest < sum(stored.num_bytes for stored in checkpoint.tensors.values()) / 2
    assert not [name for name, p in model.named_parameters() if p.dim() > 1]


def read_all(folder: Path) -> Iterator[None]:
    """Read the weights, one step for each tensor."""
    checkpoint = Checkpoint(folder)
    checkpoint.check(model := build(checkpoint))
    for _ in checkpoint.read(model.checkpoint_tensors()):
        yield


def cut_short(path: Path) -> None:
    os.truncate(path, 4096)


def write_over(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\x01" * 64)


def put_another_in_place(path: Path) -> None:
    shutil.copyfile(path, other := path.with_suffix(".new"))
    other.replace(path)


@pytest.mark.parametrize("change", [cut_short, write_over])
def test_a_file_that_is_written_to_while_it_is_read(folder: Path, change: Callable[[Path], None]) -> None:
    """Through a memory map the first would end the process and the second give weights that nobody ever had."""
    steps = read_all(folder)
    next(steps)
    time.sleep(0.02)  # beyond the resolution of a file's times
    change(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        list(steps)


@pytest.mark.parametrize("change", [cut_short, write_over, put_another_in_place])
def test_a_file_that_changes_after_its_header_was_read(folder: Path, change: Callable[[Path], None]) -> None:
    checkpoint = Checkpoint(folder)
    model = build(checkpoint)
    checkpoint.check(model)
    checkpoint.check_unchanged()
    time.sleep(0.02)
    change(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoint.check_unchanged()
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoint.load(model)


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(folder: Path) -> None:
    steps = read_all(folder)
    next(steps)
    put_another_in_place(folder / "model.safetensors")
    list(steps)


def test_a_pipe_is_no_file_of_weights(folder: Path) -> None:
    """Whoever opens one waits for its writer."""
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "no regular file" in refusal(folder)


def header(records: dict[str, Any]) -> bytes:
    text = json.dumps(records).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 8 + b"{}",
        (1 << 40).to_bytes(8, "little") + b"{}",
        header({"a": 5}),
        header({"a": {"dtype": "F32", "shape": [1]}}),
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + bytes(4),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + bytes(4),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}) + bytes(8),
        header({"a": {"dtype": "I64", "shape": [1], "data_offsets": [8, 0]}}) + bytes(8),
        header(
            {name: {"dtype": "F32", "shape": [2], "data_offsets": [4 * i, 4 * i + 8]} for i, name in enumerate("ab")}
        )
        + bytes(12),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + bytes(5),
        len(nested := b'{"a":' * 9999).to_bytes(8, "little") + nested,
    ],
    ids=lambda content: repr(content[8:60]),
)
def test_a_header_that_lies(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "truncated or corrupt" in refusal(folder)


def test_every_shape_and_dtype_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Also what has no element, no axis, or begins at an odd byte."""
    written = {
        "a": torch.arange(3, dtype=torch.int8),
        "b": torch.randn(5, 7).to(torch.bfloat16),
        "c": torch.tensor(2.5),
        "d": torch.empty(0, 4),
        "e": torch.randn(33, 3).to(torch.float8_e4m3fn),
        "f": torch.randn(2, 2, 2).half(),
    }
    save_file(written, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = WeightFile.examine(tmp_path / "x.safetensors")
    assert {name: (stored.shape, stored.num_bytes) for name, stored in file.tensors.items()} == {
        name: (tuple(tensor.shape), tensor.nbytes) for name, tensor in written.items()
    }
    seen = {name: tensor.clone() for name, tensor in file.read(reversed(written))}
    assert list(seen) == list(reversed(written))
    for name, tensor in written.items():
        assert seen[name].dtype == tensor.dtype
        assert torch.equal(seen[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
