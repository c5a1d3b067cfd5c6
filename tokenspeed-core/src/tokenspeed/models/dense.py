"""The frame of a decoder-only model: embedding, blocks, final norm, output head. The blocks are the model's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.layers.attention import SelfAttention
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.decoder import Decoder
from tokenspeed.layers.embedding import Embedding, LMHead, TiedLMHead
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.models.base import CausalLM
from tokenspeed.models.config import DenseConfig


class DenseCausalLM(CausalLM):
    """`model.*` and `lm_head` of a checkpoint. `block(layer)` builds one residual block."""

    def __init__(self, ctx: LayerContext, shape: DenseConfig, block: Callable[[int], nn.Module]) -> None:
        nn.Module.__init__(self)
        self.vocab_size = shape.vocab_size
        self.max_positions = shape.max_positions
        # Tables that early Llama checkpoints carry; they are computed here.
        self.ignored_tensors = (r"\.rotary_emb\.inv_freq$",)
        embed_tokens = Embedding(ctx, shape.vocab_size, shape.hidden_size)
        layers = [block(layer) for layer in range(shape.num_layers)]
        self.model = Decoder(ctx, embed_tokens, layers, shape.hidden_size, shape.rms_norm_eps)
        self.lm_head: LMHead
        if shape.tied:
            self.lm_head = TiedLMHead(ctx, embed_tokens)
            self.ignored_tensors += (r"^lm_head\.weight$",)
        else:
            self.lm_head = LMHead(ctx, shape.hidden_size, shape.vocab_size)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.model(batch)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


def self_attention(
    ctx: LayerContext,
    shape: DenseConfig,
    rotary: RotaryEmbedding,
    layer: int,
    *,
    window: int = 0,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm_eps: float | None = None,
) -> SelfAttention:
    """Grouped-query attention of layer `layer` with the heads that a configuration gives; options of SelfAttention."""
    return SelfAttention(
        ctx,
        layer=layer,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rotary=rotary,
        window=window,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm_eps=qk_norm_eps,
    )
