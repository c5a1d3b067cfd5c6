"""Every field of a configuration is honoured or refused with its name and a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed.errors import CheckpointError
from tokenspeed.layers.context import LayerContext
from tokenspeed.models.base import CausalLM
from tokenspeed_models.llama import LlamaForCausalLM
from tokenspeed_models.qwen2 import Qwen2ForCausalLM
from tokenspeed_models.qwen3 import Qwen3ForCausalLM
from tokenspeed_models.qwen3_moe import Qwen3MoeForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}


def build(cls: type[CausalLM], **config: Any) -> CausalLM:
    return cls({**SHAPE, **config}, LayerContext(torch.bfloat16))


def refusal(cls: type[CausalLM], **config: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        build(cls, **config)
    return str(error.value)


def test_a_planned_model_takes_no_memory() -> None:
    model = build(Qwen3ForCausalLM, vocab_size=10**6, hidden_size=2**14, num_hidden_layers=3)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_defaults_are_those_of_the_architecture() -> None:
    assert [spec.head_dim for spec in build(Qwen3ForCausalLM).kv_specs()] == [128] * 4
    assert [spec.head_dim for spec in build(LlamaForCausalLM).kv_specs()] == [8] * 4
    assert [spec.head_dim for spec in build(Qwen3MoeForCausalLM).kv_specs()] == [8] * 4
    assert build(LlamaForCausalLM).max_positions == 2048
    assert build(LlamaForCausalLM, num_key_value_heads=None).kv_specs()[0].num_kv_heads == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -1}, "vocab_size=-1 is not a positive integer"),
        ({"vocab_size": 2**70}, "vocab_size=1180591620717411303424 is not at most 2147483647"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not at most 10000"),
        ({"hidden_size": 2**30, "intermediate_size": 2**30}, "is larger than the memory of any machine"),
        ({"quantization_config": "fp8"}, "the checkpoint is quantised (fp8)"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers='12' is not a positive integer"),
        ({"num_attention_heads": True}, "num_attention_heads=True is not a positive integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not a positive number"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"hidden_size": 30}, "hidden_size=30 is not a multiple of num_attention_heads=4"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not true or false"),
        ({"attention_bias": 1}, "attention_bias=1 is not true or false"),
        ({"sliding_window": 8}, "sliding_window=8 is not supported: every layer of a Llama sees all keys"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised (fp8)"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "type 'dynamic' is not supported: its frequencies change",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "supported types are default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0}},
            "rope_parameters: factor=0 is not a positive number",
        ),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "unknown keys mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "separate parameters for each layer type"),
        ({"rope_parameters": [1]}, "rope_parameters=[1] is not an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor=4 is not below high_freq_factor=4",
        ),
    ],
)
def test_refusals(config: dict[str, Any], words: str) -> None:
    assert words in refusal(LlamaForCausalLM, **config)


def test_all_faults_are_reported_together() -> None:
    message = refusal(LlamaForCausalLM, hidden_act="relu", vocab_size=None, mlp_bias="no", rope_scaling={"type": "su"})
    assert [word in message for word in ("hidden_act", "vocab_size", "mlp_bias", "'su'")] == [True] * 4
    assert all(line.startswith("config.json: ") for line in message.splitlines())


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, [0, 0, 0, 0]),
        ({"use_sliding_window": False, "sliding_window": 8}, [0, 0, 0, 0]),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, [0, 0, 0, 8]),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, [8, 8, 8, 8]),
        ({"use_sliding_window": True, "sliding_window": 8}, [0, 0, 0, 0]),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, 0, 8, 0],
        ),
    ],
)
def test_windows(config: dict[str, Any], windows: list[int]) -> None:
    model = build(Qwen2ForCausalLM, **config)
    assert [model.get_submodule(f"model.layers.{i}.self_attn.attention").window for i in range(4)] == windows


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False}, "use_sliding_window is off"),
        ({"layer_types": ["full_attention"] * 3, "use_sliding_window": True}, "expected 4 entries"),
        ({"layer_types": ["full_attention", "chunked"] * 2, "use_sliding_window": True}, "expected 4 entries"),
        ({"layer_types": "full_attention"}, "expected 4 entries"),
        ({"layer_types": 4}, "expected 4 entries"),
        ({"layer_types": [["full_attention"]] * 4}, "expected 4 entries"),
        ({"use_sliding_window": True, "max_window_layers": "3"}, "max_window_layers='3' is not an integer"),
        ({"dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk_attention_config"),
    ],
)
def test_refusals_of_qwen2(config: dict[str, Any], words: str) -> None:
    assert words in refusal(Qwen2ForCausalLM, **config)


@pytest.mark.parametrize(("positions", "expected"), [(1024, 4096), (8192, 8192)])
def test_yarn_extends_the_context(positions: int, expected: int) -> None:
    """Qwen states the length before scaling, DeepSeek the length after it."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert build(Qwen2ForCausalLM, max_position_embeddings=positions, rope_parameters=rope).max_positions == expected
