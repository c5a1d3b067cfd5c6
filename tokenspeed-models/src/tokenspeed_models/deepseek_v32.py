"""DeepSeek-V3.2 and GLM-MoE-DSA: DeepSeek-V3 whose queries attend to the positions that a lightning indexer selects.

They differ in two things: GLM rotates neighbouring features in the indexer too, and its layers may share the selection
of an earlier layer instead of having an indexer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.decoder import DecoderLayer
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.layers.sparse import Choice, IndexShape, SparseLatentAttention
from tokenspeed.models.config import ConfigFields, read_dense
from tokenspeed.models.dense import DenseCausalLM
from tokenspeed_models.deepseek_v3 import LATENT_NORM_EPS, FeedForward, read_latent_shape, score_scale

_PATTERN = {"F": "full", "S": "shared"}


def read_feed_forward(fields: ConfigFields, num_layers: int) -> FeedForward:
    """As DeepSeek-V3's, unless `mlp_layer_types` says of each layer whether it is dense or sparse."""
    found = FeedForward.read(fields)
    kinds: Any = fields.config.get("mlp_layer_types")
    if kinds is None:
        return found
    kinds = fields.by_layer("mlp_layer_types", kinds, num_layers, ("dense", "sparse"))
    return replace(found, dense_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense"))


def read_index_shape(fields: ConfigFields, rope_dim: int, num_heads: int) -> IndexShape:
    """The sizes of the indexer; faults are left in `fields`."""
    shape = IndexShape(
        fields.positive_int("index_n_heads", num_heads),
        fields.positive_int("index_head_dim", 128),
        fields.positive_int("index_topk", 2048),
    )
    if shape.head_dim % 2 or shape.head_dim < rope_dim:
        fields.refuse("index_head_dim", f"expected an even number of at least qk_rope_head_dim={rope_dim}")
    return shape


def read_indexer_types(fields: ConfigFields, num_layers: int) -> list[str]:
    """Of each layer `full` (an indexer of its own) or `shared`: as listed, by a pattern, or every so many layers."""
    kinds: Any = fields.config.get("indexer_types")
    if kinds is None and fields.config.get("index_topk_pattern") is not None:
        kinds = [_PATTERN.get(letter, letter) for letter in str(fields.config["index_topk_pattern"])]
    if kinds is None:
        every = fields.whole("index_topk_freq", 1) or 1
        offset = fields.whole("index_skip_topk_offset", 2)
        kinds = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(num_layers)]
    found = fields.by_layer("indexer_types", kinds, num_layers, ("full", "shared"))
    if found[0] != "full":
        fields.refuse("indexer_types", f"expected {num_layers} entries, each full or shared, the first of them full")
    return found


class DeepseekV32ForCausalLM(DenseCausalLM):
    """Weights for predicting further tokens are left out."""

    index_heads = 64
    index_interleaved = False
    shares_choices = False

    def __init__(self, config: Mapping[str, Any], ctx: LayerContext) -> None:
        fields = ConfigFields(config)
        latent = read_latent_shape(fields)
        if latent.q_lora_rank is None:
            fields.refuse("q_lora_rank", "the indexer's queries come from the latent of the queries")
        shape = read_dense(fields, head_dim=latent.rope_dim, max_positions=163840)
        fields.only("rope_interleave", (True,), "the attention rotates neighbouring features")
        reason = "the architecture says which features its indexer rotates"
        fields.only("indexer_rope_interleave", (self.index_interleaved,), reason)
        fields.only("mlp_bias", (False,), "projections of the MLP have no bias")
        bias = fields.flag("attention_bias", False)
        feed_forward = read_feed_forward(fields, shape.num_layers)
        index = read_index_shape(fields, latent.rope_dim, self.index_heads)
        indexer_types = ["full"] * shape.num_layers
        if self.shares_choices:
            indexer_types = read_indexer_types(fields, shape.num_layers)
        fields.check()

        rotary = RotaryEmbedding(ctx, shape.rope, latent.rope_dim, shape.max_positions, interleaved=True)
        index_rotary = RotaryEmbedding(
            ctx,
            shape.rope,
            index.head_dim,
            shape.max_positions,
            interleaved=self.index_interleaved,
            rotary_dim=latent.rope_dim,
        )
        scale = score_scale(config, latent)
        choice = Choice()

        def block(layer: int) -> DecoderLayer:
            attention = SparseLatentAttention(
                ctx,
                layer=layer,
                hidden_size=shape.hidden_size,
                shape=latent,
                choice=choice,
                index=index if indexer_types[layer] == "full" else None,
                index_rotary=index_rotary,
                rotary=rotary,
                scale=scale,
                norm_eps=LATENT_NORM_EPS,
                bias=bias,
            )
            mlp = feed_forward.build(ctx, shape, layer)
            return DecoderLayer(ctx, shape.hidden_size, shape.rms_norm_eps, attention, mlp)

        super().__init__(ctx, shape, block)
        self.ignored_tensors += (rf"^model\.layers\.{shape.num_layers}\.",)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5: some layers share the selection of the last layer with an indexer before them."""

    index_heads = 32
    index_interleaved = True
    shares_choices = True
