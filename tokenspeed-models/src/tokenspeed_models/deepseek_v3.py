"""DeepSeek-V3 and R1: latent attention; a few dense layers, then sigmoid-routed experts beside shared ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.decoder import DecoderLayer
from tokenspeed.layers.mla import LatentAttention, LatentShape
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.moe import Experts, Router, Routing, SparseMoE
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.models.config import MAX_LAYERS, ConfigFields, DenseConfig, read_dense
from tokenspeed.models.dense import DenseCausalLM

LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever `rms_norm_eps` says."""


def read_latent_shape(fields: ConfigFields) -> LatentShape:
    """The sizes of latent attention; faults are left in `fields`."""
    has_q_lora = "q_lora_rank" not in fields.config or fields.config["q_lora_rank"] is not None
    rope_dim = fields.positive_int("qk_rope_head_dim", 64)
    if rope_dim % 2:
        fields.refuse("qk_rope_head_dim", "rotary embeddings turn pairs of features")
    rank = fields.positive_int("kv_lora_rank", 512)
    if rank % 2:
        fields.refuse("kv_lora_rank", "expected an even number")
    return LatentShape(
        num_heads=fields.positive_int("num_attention_heads", 128),
        nope_dim=fields.positive_int("qk_nope_head_dim", 128),
        rope_dim=rope_dim,
        value_dim=fields.positive_int("v_head_dim", 128),
        kv_lora_rank=rank,
        q_lora_rank=fields.positive_int("q_lora_rank", 1536) if has_q_lora else None,
    )


def score_scale(config: Mapping[str, Any], shape: LatentShape) -> float:
    """1 / sqrt(head size), times the square of YaRN's magnitude where the configuration gives `mscale_all_dim`."""
    scale = float((shape.nope_dim + shape.rope_dim) ** -0.5)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if (rope.get("rope_type") or rope.get("type") or "default") != "default" and rope.get("mscale_all_dim"):
        factor = float(rope["factor"])
        magnitude = 0.1 * float(rope["mscale_all_dim"]) * math.log(factor) + 1.0 if factor > 1 else 1.0
        scale = scale * magnitude * magnitude
    return scale


def read_routing(fields: ConfigFields) -> Routing:
    """Group-limited sigmoid routing with a correction bias; faults are left in `fields`."""
    fields.only("scoring_func", ("sigmoid",), "the router's scores are sigmoids")
    fields.only("topk_method", ("noaux_tc",), "experts are chosen with a correction bias")
    name = "num_local_experts" if "num_local_experts" in fields.config else "n_routed_experts"
    routing = Routing(
        fields.positive_int(name, 256),
        fields.positive_int("num_experts_per_tok", 8),
        scoring="sigmoid",
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.positive_number("routed_scaling_factor", 2.5),
        groups=fields.positive_int("n_group", 1),
        top_groups=fields.positive_int("topk_group", 1),
        bias=True,
        precise=True,
    )
    size = routing.num_experts // routing.groups
    if routing.num_experts % routing.groups or (routing.groups > 1 and size < 2) or routing.top_groups > routing.groups:
        fields.refuse("n_group", f"{routing.num_experts} experts, of whose groups {routing.top_groups} are kept")
    elif routing.top_k > size * routing.top_groups:
        fields.refuse("num_experts_per_tok", f"only {size * routing.top_groups} experts are eligible")
    return routing


@dataclass(frozen=True)
class FeedForward:
    """The second half of a block: a dense MLP in some layers, in the others routed experts beside shared ones."""

    routing: Routing
    intermediate_size: int
    num_shared: int
    dense_layers: frozenset[int]

    @classmethod
    def read(cls, fields: ConfigFields) -> FeedForward:
        """The first `first_k_dense_replace` layers are dense; faults are left in `fields`."""
        first_sparse = 3 if "first_k_dense_replace" not in fields.config else 0  # null: no dense layer
        fields.only("moe_layer_freq", (1,), "every layer after the dense ones has experts")
        return cls(
            read_routing(fields),
            fields.positive_int("moe_intermediate_size", 2048),
            fields.positive_int("n_shared_experts", 1),
            frozenset(range(fields.whole("first_k_dense_replace", first_sparse, most=MAX_LAYERS))),
        )

    def build(self, ctx: LayerContext, shape: DenseConfig, layer: int) -> nn.Module:
        """The module of one layer."""
        if layer in self.dense_layers:
            return GatedMLP(ctx, shape.hidden_size, shape.intermediate_size)
        return SparseMoE(
            Router(ctx, shape.hidden_size, self.routing),
            Experts(ctx, shape.hidden_size, self.intermediate_size, self.routing.num_experts),
            GatedMLP(ctx, shape.hidden_size, self.intermediate_size * self.num_shared),
        )


class DeepseekV3ForCausalLM(DenseCausalLM):
    """The first `first_k_dense_replace` layers have a dense MLP. Weights for predicting further tokens are left out."""

    def __init__(self, config: Mapping[str, Any], ctx: LayerContext) -> None:
        fields = ConfigFields(config)
        latent = read_latent_shape(fields)
        shape = read_dense(fields, head_dim=latent.rope_dim, max_positions=4096)
        bias = fields.flag("attention_bias", False)
        interleaved = fields.flag("rope_interleave", True)
        feed_forward = FeedForward.read(fields)
        fields.check()

        rotary = RotaryEmbedding(ctx, shape.rope, latent.rope_dim, shape.max_positions, interleaved=interleaved)
        scale = score_scale(config, latent)

        def block(layer: int) -> DecoderLayer:
            attention = LatentAttention(
                ctx,
                layer=layer,
                hidden_size=shape.hidden_size,
                shape=latent,
                rotary=rotary,
                scale=scale,
                norm_eps=LATENT_NORM_EPS,
                bias=bias,
            )
            mlp = feed_forward.build(ctx, shape, layer)
            return DecoderLayer(ctx, shape.hidden_size, shape.rms_norm_eps, attention, mlp)

        super().__init__(ctx, shape, block)
        self.ignored_tensors += (rf"^model\.layers\.{shape.num_layers}\.",)
