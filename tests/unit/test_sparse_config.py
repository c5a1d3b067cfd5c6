"""Configurations of mixtures of experts and latent attention: every field is honoured or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed.engine.kv_cache import KVCache, bytes_per_page
from tokenspeed.errors import CheckpointError
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.moe import Router, SparseMoE
from tokenspeed.layers.sparse import SparseLatentAttention
from tokenspeed.models.base import CausalLM
from tokenspeed_models.deepseek_v3 import DeepseekV3ForCausalLM, LatentShape, score_scale
from tokenspeed_models.deepseek_v32 import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM
from tokenspeed_models.longcat_flash import LongcatFlashForCausalLM
from tokenspeed_models.mixtral import MixtralForCausalLM
from tokenspeed_models.qwen3_moe import Qwen3MoeForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 6}
DEEPSEEK = {**SHAPE, **LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
INDEXED = {**DEEPSEEK, "index_n_heads": 6, "index_head_dim": 14, "index_topk": 20}
LONGCAT = {**SHAPE, **LATENT, "num_layers": 2, "ffn_hidden_size": 48, "n_routed_experts": 6, "moe_topk": 3}


def build(cls: type[CausalLM], config: dict[str, Any]) -> CausalLM:
    return cls(config, LayerContext(torch.bfloat16))


@pytest.mark.parametrize(
    ("cls", "config", "words"),
    [
        (Qwen3MoeForCausalLM, {**SHAPE, "num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5"),
        (MixtralForCausalLM, {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5"),
        (DeepseekV3ForCausalLM, {**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func='softmax'"),
        (DeepseekV3ForCausalLM, {**DEEPSEEK, "topk_method": "greedy"}, "topk_method='greedy'"),
        (DeepseekV3ForCausalLM, {**DEEPSEEK, "n_group": 3}, "n_group=3"),
        (DeepseekV3ForCausalLM, {**DEEPSEEK, "num_experts_per_tok": 5}, "only 4 experts are eligible"),
        (DeepseekV3ForCausalLM, {**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DeepseekV3ForCausalLM, {**DEEPSEEK, "qk_rope_head_dim": 7}, "qk_rope_head_dim=7"),
        (DeepseekV32ForCausalLM, {**INDEXED, "q_lora_rank": None}, "q_lora_rank=None"),
        (DeepseekV32ForCausalLM, {**INDEXED, "index_head_dim": 6}, "index_head_dim=6"),
        (DeepseekV32ForCausalLM, {**INDEXED, "mlp_layer_types": ["dense", "sparse"]}, "expected 4 entries"),
        (DeepseekV32ForCausalLM, {**INDEXED, "rope_interleave": False}, "rope_interleave=False"),
        (
            GlmMoeDsaForCausalLM,
            {**INDEXED, "indexer_types": ["shared", "full", "full", "full"]},
            "the first of them full",
        ),
        (GlmMoeDsaForCausalLM, {**INDEXED, "indexer_rope_interleave": False}, "indexer_rope_interleave=False"),
        (GlmMoeDsaForCausalLM, {**INDEXED, "index_topk_pattern": "FSXF"}, "each full or shared"),
        (GlmMoeDsaForCausalLM, {**INDEXED, "index_topk_pattern": 5}, "each full or shared"),
        (GlmMoeDsaForCausalLM, {**INDEXED, "index_topk_freq": "2"}, "index_topk_freq='2' is not an integer"),
        (DeepseekV3ForCausalLM, {**DEEPSEEK, "first_k_dense_replace": [1]}, "first_k_dense_replace=[1] is not an"),
        (DeepseekV3ForCausalLM, {**DEEPSEEK, "first_k_dense_replace": 10**9}, "an integer from 0 to 10000"),
        (DeepseekV3ForCausalLM, {**DEEPSEEK, "n_shared_experts": 2**40}, "n_shared_experts=1099511627776 is not at"),
        (LongcatFlashForCausalLM, {**LONGCAT, "zero_expert_num": [1]}, "zero_expert_num=[1] is not an integer"),
        (Qwen3MoeForCausalLM, {**SHAPE, "mlp_only_layers": 3}, "mlp_only_layers=3"),
        (LongcatFlashForCausalLM, {**LONGCAT, "zero_expert_type": "drop"}, "zero_expert_type='drop'"),
        (LongcatFlashForCausalLM, {**LONGCAT, "router_bias": True}, "router_bias=True"),
        (LongcatFlashForCausalLM, {**LONGCAT, "q_lora_rank": None}, "q_lora_rank=None"),
    ],
)
def test_what_cannot_be_honoured_is_refused(cls: type[CausalLM], config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        build(cls, config)
    assert words in str(error.value)


def test_which_layers_have_experts() -> None:
    config = {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = build(Qwen3MoeForCausalLM, config)
    assert [name for name, module in model.named_modules() if isinstance(module, SparseMoE)] == ["model.layers.1.mlp"]
    model = build(DeepseekV3ForCausalLM, {**DEEPSEEK, "first_k_dense_replace": 3})
    assert [name for name, module in model.named_modules() if isinstance(module, SparseMoE)] == ["model.layers.3.mlp"]
    assert model.ignores("model.layers.4.eh_proj.weight")
    assert not model.ignores("model.layers.3.eh_proj.weight")


def test_a_latent_cache_keeps_one_entry_for_a_token() -> None:
    model = build(DeepseekV3ForCausalLM, DEEPSEEK)
    specs = model.kv_specs()
    assert [(spec.num_kv_heads, spec.head_dim, spec.value_dim) for spec in specs] == [(1, 24, 0)] * 4
    assert bytes_per_page(specs) == 4 * 16 * 24 * 2
    cache = KVCache(specs, 3, max_seats=1, max_pages_per_seat=3)
    assert [(entries.shape, empty.numel()) for entries, empty in cache.tensors] == [((3, 16, 1, 24), 0)] * 4
    pages = cache.allocate(2)
    assert pages is not None
    cache.tensors[0][0][pages] = torch.nan
    cache.discard(pages)
    assert not cache.tensors[0][0].isnan().any()
    assert len(build(LongcatFlashForCausalLM, LONGCAT).kv_specs()) == 4


def test_yarn_scales_the_scores_by_its_magnitude_squared() -> None:
    shape = LatentShape(4, 10, 6, 8, 16, None)
    assert score_scale({}, shape) == 0.25
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert score_scale({"rope_scaling": yarn}, shape) == pytest.approx(
        0.25 * (0.1 * 3.6888794541) ** 2 + 0.25 * (1 + 0.2 * 3.6888794541)
    )
    assert score_scale({"rope_parameters": {"rope_type": "yarn", "factor": 40}}, shape) == 0.25


def test_router_weights_are_fp32_where_logits_are() -> None:
    routers = [m for m in build(DeepseekV3ForCausalLM, DEEPSEEK).modules() if isinstance(m, Router)]
    assert {router.dtype for router in routers} == {torch.float32}
    routers = [m for m in build(MixtralForCausalLM, SHAPE).modules() if isinstance(m, Router)]
    assert {router.dtype for router in routers} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({}, [0, 1, 2, 3]),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, [0, 3]),
        ({"index_topk_pattern": "FSFS"}, [0, 2]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [0, 3]),
        ({"index_topk_freq": 2}, [0, 1, 3]),
    ],
)
def test_which_layers_have_an_indexer_and_its_cache_plane(given: dict[str, Any], own: list[int]) -> None:
    model = build(GlmMoeDsaForCausalLM, {**INDEXED, **given})
    specs = model.kv_specs()
    assert [spec.value_dim for spec in specs] == [14 if layer in own else 0 for layer in range(4)]
    assert bytes_per_page(specs) == 16 * (4 * 24 + len(own) * 14) * 2
    attentions = [module for module in model.modules() if isinstance(module, SparseLatentAttention)]
    assert [attention.indexer is not None for attention in attentions] == [layer in own for layer in range(4)]


def test_which_layers_are_sparse_may_be_listed() -> None:
    model = build(DeepseekV32ForCausalLM, {**INDEXED, "mlp_layer_types": ["sparse", "dense", "dense", "sparse"]})
    names = [name for name, module in model.named_modules() if isinstance(module, SparseMoE)]
    assert names == ["model.layers.0.mlp", "model.layers.3.mlp"]


def test_discarded_pages_are_cleared_in_the_plane_of_the_indexer_too() -> None:
    cache = KVCache(build(DeepseekV32ForCausalLM, INDEXED).kv_specs(), 3, max_seats=1, max_pages_per_seat=3)
    assert [(entries.shape[-1], keys.shape[-1]) for entries, keys in cache.tensors] == [(24, 14)] * 4
    pages = cache.allocate(2)
    assert pages is not None
    cache.tensors[2][1][pages] = torch.nan
    cache.discard(pages)
    assert not cache.tensors[2][1].isnan().any()
