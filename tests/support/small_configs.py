"""Configurations of small checkpoints with experts or latent attention, for `make_checkpoint` (tests/conftest.py).

The smallest sizes that still tell one axis from another, as there: no two that could be mistaken are equal.
"""

from __future__ import annotations

from typing import Any

QWEN3_MOE = {"head_dim": 32, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK = {
    **LATENT,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
LONGCAT = {
    **LATENT,
    "num_hidden_layers": 4,
    "num_layers": 2,
    "ffn_hidden_size": 160,
    "n_routed_experts": 7,
    "zero_expert_num": 4,
    "moe_topk": 4,
    "expert_ffn_hidden_size": 40,
    "head_dim": 8,
}
MAGNITUDES = {"mscale": 1.0, "mscale_all_dim": 0.7}
"""What the DeepSeek architectures add to YaRN."""


def yarn(original_positions: int) -> dict[str, Any]:
    """`rope_parameters` that stretch so many positions to four times as many."""
    return {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": original_positions,
    }
