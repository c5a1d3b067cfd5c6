"""The models compute what `transformers`' own classes compute, on checkpoints that `transformers` wrote.

fp32, reference kernels. Logits agree to 1e-5 of the largest logit of their row; greedy tokens are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.models.base import CausalLM
from tokenspeed.models.registry import ModelRegistry, model_class
from tokenspeed.testing.models import PagedModel, load_model
from tokenspeed_models.plugin import tokenspeed_models

TOLERANCE = 1e-5
REGISTRY = ModelRegistry(tokenspeed_models())

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 9}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-gqa-head-dim": ("Llama", {"head_dim": 32}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-eps-theta": (
        "Llama",
        {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "qwen2-sliding": ("Qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biases-tied": ("Qwen3", {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-sliding-types": (
        "Qwen3",
        {
            **SLIDING,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-yarn-details": (
        "Qwen3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **YARN,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
                "truncate": False,
            },
        },
    ),
    "qwen3-yarn-mscale": ("Qwen3", {"head_dim": 32, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, make_checkpoint: Any) -> Path:
    family, config = CASES[request.param]
    path = make_checkpoint(family, **config)
    assert isinstance(path, Path)
    return path


def load(folder: Path, **options: Any) -> CausalLM:
    import json

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return load_model(model_class(REGISTRY.find(architecture)), folder, **options)


def theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


def test_logits_agree(folder: Path) -> None:
    ids = random_ids(90, seed=1)
    with torch.inference_mode():
        expected = theirs(folder)(torch.tensor([ids])).logits[0]
    actual = PagedModel(load(folder)).feed({0: ids})[0]
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) < TOLERANCE


def test_greedy_tokens_are_the_same(folder: Path) -> None:
    prompt = random_ids(21, seed=2)
    expected = theirs(folder).generate(
        torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, use_cache=True
    )
    assert PagedModel(load(folder)).generate(0, prompt, 24) == expected[0, len(prompt) :].tolist()
