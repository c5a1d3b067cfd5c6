"""Fixtures for every test: small random checkpoints that `transformers` itself wrote."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 320

# The smallest shapes that still tell one axis from another: no two sizes are equal.
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`make_checkpoint("Qwen3", dtype=torch.float32, max_shard_size="5GB", **config)`: a directory by transformers.

    The same arguments give the same directory, once for the whole session, and the same weights whichever tests ran
    before; do not write into it. Biases and norm
    weights are random too, since zeros and ones would hide that they are ignored.
    """
    made: dict[str, Path] = {}

    def make(
        family: str,
        *,
        dtype: torch.dtype = torch.float32,
        max_shard_size: str = "5GB",
        seed: int | None = None,
        **config: Any,
    ) -> Path:
        import transformers

        key = repr((family, dtype, max_shard_size, seed, sorted(config.items(), key=lambda item: item[0])))
        if key in made:
            return made[key]
        with torch.random.fork_rng():
            torch.manual_seed(zlib.crc32(key.encode()) if seed is None else seed)
            settings = getattr(transformers, f"{family}Config")(**{**_SHAPE, **config})
            model = getattr(transformers, f"{family}ForCausalLM")(settings)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.data.normal_(0, 0.2)
                elif "norm" in name:
                    parameter.data.uniform_(0.5, 1.5)
                elif "proj" in name:
                    # Large enough that attention is not uniform and that the blocks outweigh the embedding; a model
                    # with tied embeddings would repeat its last token otherwise.
                    parameter.data.normal_(0, 0.15)
                else:
                    parameter.data.normal_(0, 0.04)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.1)
            folder = tmp_path_factory.mktemp(family.lower())
            model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        made[key] = folder
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_qwen3(make_checkpoint: MakeCheckpoint) -> Path:
    """A random fp32 Qwen3 with tied embeddings, head_dim 32, and three query heads for each kv head."""
    return make_checkpoint("Qwen3", seed=0, head_dim=32, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_llama(make_checkpoint: MakeCheckpoint) -> Path:
    """A random fp32 Llama, not tied."""
    return make_checkpoint("Llama", seed=0, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tiny_qwen2(make_checkpoint: MakeCheckpoint) -> Path:
    """A random bf16 Qwen2, not tied."""
    return make_checkpoint("Qwen2", seed=0, dtype=torch.bfloat16, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: on small tensors a second one costs far more in waiting than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
