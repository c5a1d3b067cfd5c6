"""Llama 2 and 3, and everything that calls itself `LlamaForCausalLM` (SmolLM2, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.decoder import DecoderLayer
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.models.config import ConfigFields, read_dense
from tokenspeed.models.dense import DenseCausalLM, self_attention


class LlamaForCausalLM(DenseCausalLM):
    """Grouped-query attention and a gated MLP; `attention_bias` and `mlp_bias` give their projections biases."""

    def __init__(self, config: Mapping[str, Any], ctx: LayerContext) -> None:
        fields = ConfigFields(config)
        shape = read_dense(fields, max_positions=2048)
        attention_bias = fields.flag("attention_bias", False)
        mlp_bias = fields.flag("mlp_bias", False)
        if config.get("sliding_window") is not None:
            fields.refuse("sliding_window", "every layer of a Llama sees all keys")
        fields.check()

        rotary = RotaryEmbedding(ctx, shape.rope, shape.head_dim, shape.max_positions)

        def block(layer: int) -> DecoderLayer:
            attention = self_attention(ctx, shape, rotary, layer, qkv_bias=attention_bias, output_bias=attention_bias)
            mlp = GatedMLP(ctx, shape.hidden_size, shape.intermediate_size, bias=mlp_bias)
            return DecoderLayer(ctx, shape.hidden_size, shape.rms_norm_eps, attention, mlp)

        super().__init__(ctx, shape, block)
