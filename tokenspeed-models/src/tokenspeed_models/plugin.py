"""The models of this distribution, as facts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from tokenspeed.hookspecs import hookimpl
from tokenspeed.models.profile import ModelProfile

TOKENSPEED_API = 1

_VERIFIED = frozenset({"auto", "rl-bitwise"})
_SWITCHES = frozenset({"layer_boundary_norm"})
_MOE_SWITCHES = _SWITCHES | {"router_topk", "moe_combine_order"}
_SPARSE_SWITCHES = _MOE_SWITCHES | {"yarn_ramp_mask_device", "dsa_slot_order"}


@hookimpl
def tokenspeed_models() -> Iterable[ModelProfile]:
    """Dense decoders, mixtures of experts, and the embedded model `tiny` (a Qwen3)."""
    return [
        ModelProfile(
            "LlamaForCausalLM",
            "tokenspeed_models.llama:LlamaForCausalLM",
            _VERIFIED,
            _SWITCHES,
            bit_order="tokenspeed-models/llama@1",
        ),
        ModelProfile(
            "Qwen2ForCausalLM",
            "tokenspeed_models.qwen2:Qwen2ForCausalLM",
            _VERIFIED,
            _SWITCHES,
            bit_order="tokenspeed-models/qwen2@1",
        ),
        ModelProfile(
            "Qwen3ForCausalLM",
            "tokenspeed_models.qwen3:Qwen3ForCausalLM",
            _VERIFIED,
            _SWITCHES,
            embedded=MappingProxyType({"tiny": "tokenspeed_models:tiny"}),
            bit_order="tokenspeed-models/qwen3@1",
        ),
        ModelProfile(
            "Qwen3MoeForCausalLM",
            "tokenspeed_models.qwen3_moe:Qwen3MoeForCausalLM",
            _VERIFIED,
            _MOE_SWITCHES,
            bit_order="tokenspeed-models/qwen3_moe@1",
        ),
        ModelProfile(
            "MixtralForCausalLM",
            "tokenspeed_models.mixtral:MixtralForCausalLM",
            _VERIFIED,
            _MOE_SWITCHES,
            bit_order="tokenspeed-models/mixtral@1",
        ),
        ModelProfile(
            "DeepseekV3ForCausalLM",
            "tokenspeed_models.deepseek_v3:DeepseekV3ForCausalLM",
            _VERIFIED,
            _MOE_SWITCHES | {"yarn_ramp_mask_device"},
            bit_order="tokenspeed-models/deepseek_v3@1",
        ),
        ModelProfile(
            "DeepseekV32ForCausalLM",
            "tokenspeed_models.deepseek_v32:DeepseekV32ForCausalLM",
            _VERIFIED,
            _SPARSE_SWITCHES,
            bit_order="tokenspeed-models/deepseek_v32@1",
        ),
        ModelProfile(
            "GlmMoeDsaForCausalLM",
            "tokenspeed_models.deepseek_v32:GlmMoeDsaForCausalLM",
            _VERIFIED,
            _SPARSE_SWITCHES,
            bit_order="tokenspeed-models/glm_moe_dsa@1",
        ),
        ModelProfile(
            "LongcatFlashForCausalLM",
            "tokenspeed_models.longcat_flash:LongcatFlashForCausalLM",
            _VERIFIED,
            _MOE_SWITCHES | {"yarn_ramp_mask_device", "mla_lora_scale"},
            bit_order="tokenspeed-models/longcat_flash@1",
        ),
    ]
