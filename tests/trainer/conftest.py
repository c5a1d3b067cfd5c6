"""Small checkpoints of every architecture that can be adopted, with a tokenizer, and engines on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from small_configs import DEEPSEEK, LONGCAT, MAGNITUDES, MIXTRAL, QWEN3_MOE, yarn

INDEXER = {"index_n_heads": 6, "index_head_dim": 22, "index_topk": 24}
YARN = {**yarn(512), **MAGNITUDES}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
    "Qwen3Moe": {**QWEN3_MOE, "mlp_only_layers": [1], "norm_topk_prob": True},
    "Mixtral": {**MIXTRAL, "sliding_window": 64},
    "DeepseekV3": {**DEEPSEEK, "rope_parameters": YARN},
    "DeepseekV32": {**DEEPSEEK, **INDEXER, "rope_parameters": YARN},
    "GlmMoeDsa": {
        **DEEPSEEK,
        **INDEXER,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_group": 1,
        "topk_group": 1,
    },
    "LongcatFlash": {**LONGCAT, "routed_scaling_factor": 9.0},
}

MakeFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def make_folder(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """`make_folder("Qwen3", torch.bfloat16)`: a checkpoint of `FAMILIES` with a tokenizer of bytes, made once."""
    made: dict[Any, Path] = {}

    def make(family: str, dtype: torch.dtype) -> Path:
        if (family, dtype) not in made:
            source = make_checkpoint(family, dtype=dtype, seed=5, **FAMILIES[family])
            folder = tmp_path_factory.mktemp("trainer") / f"{family.lower()}-{dtype}".replace("torch.", "")
            shutil.copytree(source, folder)
            weaken_bias(folder / "model.safetensors")
            byte_tokenizer().save(str(folder / "tokenizer.json"))
            made[family, dtype] = folder
        return made[family, dtype]

    return make


def weaken_bias(file: Path) -> None:
    """Make the correction biases of routers small beside their scores, so that tokens choose different experts."""
    tensors = load_file(file)
    biases = {name: tensor * 0.1 for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}
    if biases:
        save_file(tensors | biases, file, {"format": "pt"})


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, behind three special ones."""
    specials = ["<pad>", "<s>", "</s>"]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer


@pytest.fixture(scope="session")
def load_trainer() -> Callable[[Path], Any]:
    """`load_trainer(folder)`: the checkpoint as a trainer loads it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()

    def load(folder: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")

    return load
