"""Qwen3-MoE: Qwen3's attention, and a softmax mixture of experts in most or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.decoder import DecoderLayer
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.moe import Experts, Router, Routing, SparseMoE
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.models.config import ConfigFields, read_dense
from tokenspeed.models.dense import DenseCausalLM, self_attention


class Qwen3MoeForCausalLM(DenseCausalLM):
    """Grouped-query attention with normed queries and keys, and routed experts.

    `mlp_only_layers` and `decoder_sparse_step` say which layers have a dense MLP instead.
    """

    def __init__(self, config: Mapping[str, Any], ctx: LayerContext) -> None:
        fields = ConfigFields(config)
        shape = read_dense(fields)
        attention_bias = fields.flag("attention_bias", False)
        # Every layer slides, or none; Qwen2's `max_window_layers` means nothing here.
        window = fields.positive_int("sliding_window", 4096) if fields.flag("use_sliding_window", False) else 0
        num_experts = fields.positive_int("num_local_experts" if "num_local_experts" in config else "num_experts", 128)
        routing = Routing(
            num_experts,
            fields.positive_int("num_experts_per_tok", 8),
            normalise=fields.flag("norm_topk_prob", False),
        )
        if routing.top_k > num_experts:
            fields.refuse("num_experts_per_tok", f"there are {num_experts} experts")
        intermediate = fields.positive_int("moe_intermediate_size", 768)
        step = fields.positive_int("decoder_sparse_step", 1)
        dense_layers = config.get("mlp_only_layers") or ()
        if not isinstance(dense_layers, list | tuple):
            fields.refuse("mlp_only_layers", "expected a list of layers")
        fields.check()

        rotary = RotaryEmbedding(ctx, shape.rope, shape.head_dim, shape.max_positions)

        def feed_forward(layer: int) -> nn.Module:
            if layer in dense_layers or (layer + 1) % step:
                return GatedMLP(ctx, shape.hidden_size, shape.intermediate_size)
            router = Router(ctx, shape.hidden_size, routing)
            return SparseMoE(router, Experts(ctx, shape.hidden_size, intermediate, num_experts))

        def block(layer: int) -> DecoderLayer:
            attention = self_attention(
                ctx,
                shape,
                rotary,
                layer,
                window=window,
                qkv_bias=attention_bias,
                output_bias=attention_bias,
                qk_norm_eps=shape.rms_norm_eps,
            )
            return DecoderLayer(ctx, shape.hidden_size, shape.rms_norm_eps, attention, feed_forward(layer))

        super().__init__(ctx, shape, block)
