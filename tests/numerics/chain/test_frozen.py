"""Today's bits = the bits of the published orders: digests of replies of models that are made of integers.

A digest here changes only when an order of additions does. Then the version of that order (`aok/…@2`, `…/qwen3@2`,
`tokenspeed/engine@2`) must change with it, since equal fingerprints mean equal bits.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.config_sources import load_config
from tokenspeed.verify.items import make_item
from tokenspeed.verify.lab import Lab

CONFIG: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}

REQUESTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (5, {"temperature": 0.0}),
    (17, {"temperature": 1.0}),
    (64, {"temperature": 0.7, "top_k": 20}),
    (129, {"temperature": 1.0, "top_p": 0.9}),
    (257, {"temperature": 1.4, "min_p": 0.02}),
    (300, {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}),
    (33, {"temperature": 0.0, "logit_bias": {7: 2.5}}),
)

FROZEN = {
    "Qwen3ForCausalLM": "0e533f13125d42861650d26b12992158cfaf8f7d0bc57ad7b1da33337e90a295",
    "LlamaForCausalLM": "2260b90af501e1f3c21a85b13d2a9929dd39771fc6d1bde195b849222cbecb32",
    "Qwen2ForCausalLM": "bd4dae26dd04132345749a594576785e7cf5864fdc85a153153f35acc657ebd9",
}


def integers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Multiples of 2^-10 in [-0.25, 0.25) from a linear congruential generator (Knuth's MMIX), the same everywhere."""
    state = np.uint64(sum(name.encode()) * 2654435761 + 1)
    count = int(np.prod(shape))
    powers = np.empty(count, dtype=np.uint64)
    for i in range(count):
        state = np.uint64((int(state) * 6364136223846793005 + 1442695040888963407) % 2**64)
        powers[i] = state >> np.uint64(55)
    values = (powers.astype(np.int64) - 256).astype(np.float32) / 1024
    if "norm" in name:
        values = values + 1
    return torch.from_numpy(values.reshape(shape)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make_model(architecture)`: the checkpoint."""

    def make(architecture: str) -> Path:
        from tokenspeed.layers.context import LayerContext
        from tokenspeed.models.registry import ModelRegistry, model_class
        from tokenspeed.plugins import load_plugins

        folder = tmp_path_factory.mktemp(architecture)
        config = {**CONFIG, "architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(config))
        profile = ModelRegistry.from_plugins(load_plugins()).find(architecture)
        shapes = model_class(profile)(config, LayerContext(torch.bfloat16)).checkpoint_tensors()  # type: ignore[arg-type]
        tensors = {name: integers(name, target.shape) for name, target in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.mark.parametrize("architecture", FROZEN)
def test_the_bits_are_those_that_were_published(architecture: str, make_model: Any) -> None:
    config = {"model": str(make_model(architecture)), "numerics": "rl-bitwise"}
    lab = Lab(load_config(config, environ={}))
    digest = hashlib.sha256()
    for number, (length, params) in enumerate(REQUESTS):
        prompt = [(number * 131 + i * 37) % 500 for i in range(length)]
        outcome = lab.alone(make_item(str(number), prompt, 1000 + number, 12, **params))
        digest.update(repr((outcome.token_ids, outcome.bits)).encode())
    assert digest.hexdigest() == FROZEN[architecture], (
        "an order of additions has changed; see the docstring of this file"
    )
