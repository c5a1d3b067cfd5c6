"""Models with sparse latent attention against transformers' classes, on random checkpoints that transformers saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenspeed.loading.checkpoint import Checkpoint
from tokenspeed.models.base import CausalLM
from tokenspeed.models.profile import ModelProfile
from tokenspeed.models.registry import ModelRegistry, model_class
from tokenspeed.testing.models import PagedModel, load_model
from tokenspeed_models.plugin import tokenspeed_models

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5
TOP_K = 24
REGISTRY = ModelRegistry(tokenspeed_models())
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SPARSE = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 6,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 18,
    "index_head_dim": 22,
    "index_topk": TOP_K,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3.2": ("DeepseekV32", {**SPARSE, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "deepseek-v3.2-plain": (
        "DeepseekV32",
        {**SPARSE, "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
    ),
    "glm-moe-dsa": ("GlmMoeDsa", {**SPARSE, "n_group": 1, "topk_group": 1}),
    "glm-moe-dsa-shared": (
        "GlmMoeDsa",
        {**SPARSE, "num_hidden_layers": 5, "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    ),
}

MakeCheckpoint = Callable[..., Path]
Pair = tuple[CausalLM, Any]


def ours(folder: Path, **options: Any) -> CausalLM:
    profile = REGISTRY.find(Checkpoint(folder).architecture)
    assert isinstance(profile, ModelProfile)
    return load_model(model_class(profile), folder, **options)


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def expected_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


def selected(model: torch.nn.Module, run: Callable[[], object]) -> list[list[set[int]]]:
    """The positions that each query selected, indexer by indexer, while `run` computes whole sequences.

    transformers fills up with positions that a query does not see, we do with -1.
    """
    found: list[list[set[int]]] = []

    def note(_module: object, _inputs: object, out: torch.Tensor) -> None:
        rows = out.reshape(-1, out.shape[-1]).tolist()
        found.append([{at for at in row if 0 <= at <= position} for position, row in enumerate(rows)])

    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    hooks = [indexer.register_forward_hook(note) for indexer in indexers]
    run()
    for hook in hooks:
        hook.remove()
    assert len(found) == len(indexers) > 0
    return found


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> Pair:
    """(our model, theirs) of one case."""
    family, config = CASES[request.param]
    folder = make_checkpoint(family, **config)
    return ours(folder), theirs(folder)


@pytest.mark.parametrize("length", [TOP_K - 4, 6 * TOP_K])
def test_logits_and_selections_agree(pair: Pair, length: int) -> None:
    """Below `index_topk`, where every position is selected, and well above it."""
    ids = random_ids(length, seed=1)
    found: list[torch.Tensor] = []
    mine = selected(pair[0], lambda: found.append(PagedModel(pair[0]).feed({0: ids})[0]))
    other = selected(pair[1], lambda: found.append(expected_logits(pair[1], ids)))
    assert relative_error(*found) < TOLERANCE
    assert mine == other
    sizes = {len(row) for layer in mine for row in layer}
    assert sizes == set(range(1, min(length, TOP_K) + 1))


def test_greedy_tokens_are_the_same(pair: Pair) -> None:
    seen: set[int] = set()
    for seed, length in enumerate((5, 17, TOP_K - 2, 60, 90)):
        prompt = random_ids(length, seed=seed)
        output = pair[1].generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)
        expected = output[0, len(prompt) :].tolist()
        assert PagedModel(pair[0]).generate(0, prompt, 9) == expected
        seen.update(expected)
    assert len(seen) > 3, "the model repeats itself, which shows nothing"
