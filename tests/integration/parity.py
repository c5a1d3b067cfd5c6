"""Our models and transformers' side by side, for tests that compare their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tokenspeed.loading.checkpoint import Checkpoint
from tokenspeed.models.base import CausalLM
from tokenspeed.models.profile import ModelProfile
from tokenspeed.models.registry import ModelRegistry, model_class
from tokenspeed.testing.models import load_model
from tokenspeed_models.plugin import tokenspeed_models

REGISTRY = ModelRegistry(tokenspeed_models())


def model_of(folder: Path) -> type[CausalLM]:
    """Our class for a checkpoint's architecture."""
    profile = REGISTRY.find(Checkpoint(folder).architecture)
    assert isinstance(profile, ModelProfile)
    return model_class(profile)


def ours(folder: Path, **options: Any) -> CausalLM:
    """Our model, filled from a checkpoint; options as for `load_model`."""
    return load_model(model_of(folder), folder, **options)


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model, with attention and experts in plain torch."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids of the small checkpoints."""
    ids: list[int] = torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def expected_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' logits [n,V] after each token."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row over the largest magnitude in it, over all rows."""
    assert actual.shape == expected.shape
    return float(((actual - expected).abs().amax(-1) / expected.abs().amax(-1)).max())
