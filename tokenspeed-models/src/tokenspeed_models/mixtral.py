"""Mixtral: Llama's attention, and a softmax mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.decoder import DecoderLayer
from tokenspeed.layers.moe import ExpertNames, Experts, Router, Routing, SparseMoE
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.models.config import ConfigFields, read_dense
from tokenspeed.models.dense import DenseCausalLM, self_attention

NAMES = ExpertNames(gate="w1", up="w3", down="w2", block="block_sparse_moe")
"""What Mixtral checkpoints call the block and an expert's projections."""


class MixtralForCausalLM(DenseCausalLM):
    """Grouped-query attention and experts whose weights are normalised; `sliding_window` holds for every layer."""

    def __init__(self, config: Mapping[str, Any], ctx: LayerContext) -> None:
        fields = ConfigFields(config)
        shape = read_dense(fields, max_positions=131072)
        window = fields.positive_int("sliding_window") if config.get("sliding_window") is not None else 0
        routing = Routing(fields.positive_int("num_local_experts", 8), fields.positive_int("num_experts_per_tok", 2))
        if routing.top_k > routing.num_experts:
            fields.refuse("num_experts_per_tok", f"there are {routing.num_experts} experts")
        fields.check()

        rotary = RotaryEmbedding(ctx, shape.rope, shape.head_dim, shape.max_positions)

        def block(layer: int) -> DecoderLayer:
            attention = self_attention(ctx, shape, rotary, layer, window=window)
            router = Router(ctx, shape.hidden_size, routing, NAMES)
            experts = Experts(ctx, shape.hidden_size, shape.intermediate_size, routing.num_experts, NAMES)
            return DecoderLayer(ctx, shape.hidden_size, shape.rms_norm_eps, attention, SparseMoE(router, experts))

        super().__init__(ctx, shape, block)
