"""Qwen3 (dense): every query and key head is normed before its rotation, and heads need not divide the hidden size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.decoder import DecoderLayer
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.models.config import ConfigFields, read_dense, read_windows
from tokenspeed.models.dense import DenseCausalLM, self_attention


class Qwen3ForCausalLM(DenseCausalLM):
    """Grouped-query attention with normed queries and keys, and a gated MLP."""

    def __init__(self, config: Mapping[str, Any], ctx: LayerContext) -> None:
        fields = ConfigFields(config)
        shape = read_dense(fields, head_dim=128)
        attention_bias = fields.flag("attention_bias", False)
        windows = read_windows(fields, shape.num_layers)
        fields.check()

        rotary = RotaryEmbedding(ctx, shape.rope, shape.head_dim, shape.max_positions)

        def block(layer: int) -> DecoderLayer:
            attention = self_attention(
                ctx,
                shape,
                rotary,
                layer,
                window=windows[layer],
                qkv_bias=attention_bias,
                output_bias=attention_bias,
                qk_norm_eps=shape.rms_norm_eps,
            )
            mlp = GatedMLP(ctx, shape.hidden_size, shape.intermediate_size)
            return DecoderLayer(ctx, shape.hidden_size, shape.rms_norm_eps, attention, mlp)

        super().__init__(ctx, shape, block)
