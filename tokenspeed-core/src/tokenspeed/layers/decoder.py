"""A pre-norm decoder: embedding, residual blocks, final norm. What is inside a block is the model's business."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.embedding import Embedding
from tokenspeed.layers.norm import ResidualRMSNorm


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    The sum of a block is left to the next norm, so that the two can be one kernel: a layer passes on its last output
    and the residual stream that it has not been added to yet.
    """

    def __init__(self, ctx: LayerContext, hidden_size: int, eps: float, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = ResidualRMSNorm(ctx, hidden_size, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = ResidualRMSNorm(ctx, hidden_size, eps)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of the MLP, residual stream before it is added), each [T,H]."""
        x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.self_attn(x, batch)
        x, residual = self.post_attention_layernorm.add_and_norm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """`model.*` of a checkpoint: `embed_tokens`, `layers`, `norm`."""

    def __init__(
        self, ctx: LayerContext, embed_tokens: Embedding, layers: Iterable[nn.Module], hidden_size: int, eps: float
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = ResidualRMSNorm(ctx, hidden_size, eps)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Normalised hidden states [T,H] of every token of the batch."""
        x: torch.Tensor = self.embed_tokens(batch.token_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return self.norm.add_and_norm(x, residual)[0]
