"""Small checkpoints of every architecture that can be adopted, with a tokenizer, and engines on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
}

MakeFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def make_folder(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """`make_folder("Qwen3", torch.bfloat16)`: a checkpoint of `FAMILIES` with a tokenizer of bytes, made once."""
    made: dict[Any, Path] = {}

    def make(family: str, dtype: torch.dtype) -> Path:
        if (family, dtype) not in made:
            source = make_checkpoint(family, dtype=dtype, **FAMILIES[family])
            folder = tmp_path_factory.mktemp("trainer") / f"{family.lower()}-{dtype}".replace("torch.", "")
            shutil.copytree(source, folder)
            byte_tokenizer().save(str(folder / "tokenizer.json"))
            made[family, dtype] = folder
        return made[family, dtype]

    return make


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
