"""LongCat-Flash: two latent attentions and two dense MLPs in a layer, and experts on a shortcut around the second half.

Some of the experts are identities ("zero experts"): a token that chooses them costs less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.mla import LatentAttention, LatentShape
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.moe import ExpertNames, Experts, Router, Routing
from tokenspeed.layers.norm import ResidualRMSNorm
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.models.config import ConfigFields, DenseConfig, read_dense
from tokenspeed.models.dense import DenseCausalLM
from tokenspeed_models.deepseek_v3 import LATENT_NORM_EPS, read_latent_shape, score_scale

NAMES = ExpertNames(router="classifier.weight")


class ShortcutMoE(nn.Module):
    """`router` and `experts` of a checkpoint."""

    def __init__(
        self, ctx: LayerContext, hidden_size: int, intermediate_size: int, num_experts: int, routing: Routing
    ) -> None:
        super().__init__()
        self.router = Router(ctx, hidden_size, routing, NAMES)
        zero_experts = routing.num_experts - num_experts
        self.experts = Experts(ctx, hidden_size, intermediate_size, num_experts, NAMES, zero_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T,H] -> [T,H]."""
        out: torch.Tensor = self.experts(x, *self.router(x))
        return out


class LongcatFlashLayer(nn.Module):
    """Two residual halves of attention and MLP; the experts read what the first MLP reads and are added at the end."""

    def __init__(
        self, ctx: LayerContext, shape: DenseConfig, attentions: list[LatentAttention], mlp: ShortcutMoE
    ) -> None:
        super().__init__()

        def norms() -> nn.ModuleList:
            return nn.ModuleList(ResidualRMSNorm(ctx, shape.hidden_size, shape.rms_norm_eps) for _ in range(2))

        self.input_layernorm = norms()
        self.self_attn = nn.ModuleList(attentions)
        self.post_attention_layernorm = norms()
        self.mlps = nn.ModuleList(GatedMLP(ctx, shape.hidden_size, shape.intermediate_size) for _ in range(2))
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of the experts, residual stream before it is added), each [T,H]."""
        x, residual = self._attend(0, x, residual, batch)
        shortcut = self.mlp(x)
        x, residual = self._attend(1, self.mlps[0](x), residual, batch)
        return shortcut, residual + self.mlps[1](x)

    def _attend(
        self, half: int, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before, after = self.input_layernorm[half], self.post_attention_layernorm[half]
        assert isinstance(before, ResidualRMSNorm)
        assert isinstance(after, ResidualRMSNorm)
        x, residual = before.add_and_norm(x, residual)
        return after.add_and_norm(self.self_attn[half](x, batch), residual)


def _translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the names that other architectures use for the same things."""
    names = {"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size"}
    return {**config, **{other: config[own] for own, other in names.items() if own in config}}


class LongcatFlashForCausalLM(DenseCausalLM):
    """Softmax routing with a correction bias over real and zero experts. Multi-token prediction is left out."""

    def __init__(self, config: Mapping[str, Any], ctx: LayerContext) -> None:
        fields = ConfigFields(_translated(config))
        latent = read_latent_shape(fields)
        shape = read_dense(fields, head_dim=latent.rope_dim, max_positions=131072)
        num_experts = fields.positive_int("n_routed_experts", 512)
        zero_experts = fields.whole("zero_expert_num", 0)
        routing = Routing(
            num_experts + zero_experts,
            fields.positive_int("moe_topk", 12),
            normalise=False,
            scale=fields.positive_number("routed_scaling_factor", 6.0),
            bias=True,
            precise=True,
        )
        if routing.top_k > routing.num_experts:
            fields.refuse("moe_topk", f"there are {routing.num_experts} experts")
        intermediate = fields.positive_int("expert_ffn_hidden_size", 2048)
        bias = fields.flag("attention_bias", False)
        fields.only("zero_expert_type", ("identity",), "a zero expert passes its input on")
        fields.only("router_bias", (False,), "the router's classifier has no bias of its own")
        for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
            fields.only(name, (True,), "queries and latents are scaled")
        if latent.q_lora_rank is None:
            fields.refuse("q_lora_rank", "queries always come from a latent")
        fields.check()

        rotary = RotaryEmbedding(ctx, shape.rope, latent.rope_dim, shape.max_positions, interleaved=True)

        def attention(index: int) -> LatentAttention:
            return LatentAttention(
                ctx,
                layer=index,
                hidden_size=shape.hidden_size,
                shape=latent,
                rotary=rotary,
                scale=score_scale(config, latent),
                norm_eps=LATENT_NORM_EPS,
                bias=bias,
                lora_scales=lora_scales(shape.hidden_size, latent),
            )

        def block(layer: int) -> LongcatFlashLayer:
            moe = ShortcutMoE(ctx, shape.hidden_size, intermediate, num_experts, routing)
            return LongcatFlashLayer(ctx, shape, [attention(2 * layer), attention(2 * layer + 1)], moe)

        super().__init__(ctx, shape, block)
        # transformers writes unused projections for the identities.
        identities = "|".join(str(expert) for expert in range(num_experts, num_experts + zero_experts))
        self.ignored_tensors += (r"^model\.mtp\.", rf"\.mlp\.experts\.({identities or 'none'})\.")


def lora_scales(hidden_size: int, latent: LatentShape) -> tuple[float, float]:
    """sqrt(H / rank) of queries and of the key/value latent."""
    assert latent.q_lora_rank is not None
    return float((hidden_size / latent.q_lora_rank) ** 0.5), float((hidden_size / latent.kv_lora_rank) ** 0.5)
