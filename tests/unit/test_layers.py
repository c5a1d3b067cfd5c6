"""Layers ask for what they will call, and nothing else; the switches reach them as arguments."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.errors import PluginError, Problem
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.linear import MergedLinear
from tokenspeed.layers.norm import ResidualRMSNorm
from tokenspeed.models.profile import ModelProfile
from tokenspeed.models.registry import ModelRegistry, model_class
from tokenspeed.testing.models import bind_kernels
from tokenspeed_models.llama import LlamaForCausalLM
from tokenspeed_models.plugin import tokenspeed_models

CONFIG = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(("value", "fused"), [("fused", True), ("unfused", False)])
def test_the_layer_boundary_switch_decides_the_operator(value: str, fused: bool) -> None:
    ctx = LayerContext(torch.bfloat16, {"layer_boundary_norm": value}, frozenset({"batch_invariant"}))
    LlamaForCausalLM(CONFIG, ctx)
    needs = list(ctx.needs())
    assert ("norm.add_rms" in {need.operator for need in needs}) is fused
    assert all(need.features == {"batch_invariant"} for need in needs)


def test_a_model_needs_each_operator_once_for_each_shape() -> None:
    ctx = LayerContext(torch.float32)
    LlamaForCausalLM(CONFIG, ctx)
    shapes = {tuple(dict(need.facts).values()) for need in ctx.needs() if need.operator == "gemm.linear"}
    assert shapes == {(32, 64), (32, 32), (32, 96), (48, 32), (32, 50)}
    (attention,) = [need for need in ctx.needs() if need.operator == "attention.paged"]
    assert dict(attention.facts) == {"head_dim": 8, "group_size": 2}


def test_unfused_is_a_rounded_sum_and_then_the_norm() -> None:
    results = []
    for value in ("fused", "unfused"):
        ctx = LayerContext(torch.bfloat16, {"layer_boundary_norm": value})
        layer = ResidualRMSNorm(ctx, 64, 1e-6)
        bind_kernels(ctx)
        layer.allocate(torch.device("cpu"))
        layer.weight.data.fill_(1)
        x, residual = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        out, total = layer.add_and_norm(x, residual)
        assert torch.equal(total, x + residual)
        assert torch.equal(out, layer(x + residual)) is (value == "unfused")
        results.append(total)
        first, stream = layer.add_and_norm(x, None)
        assert stream is x
        assert torch.equal(first, layer(x))
    assert torch.equal(*results)


def test_merged_projections_are_their_parts() -> None:
    ctx = LayerContext(torch.float32)
    layer = MergedLinear(ctx, 16, {"a": 5, "b": 3}, bias=True)
    bind_kernels(ctx)
    targets = dict(layer.checkpoint_tensors("block.merged"))
    assert list(targets) == ["block.a.weight", "block.b.weight", "block.a.bias", "block.b.bias"]
    layer.allocate(torch.device("cpu"))
    tensors = {name: torch.randn(target.shape) for name, target in targets.items()}
    for name, target in targets.items():
        target.fill(tensors[name])
    layer.prepare_weights()
    layer.prepare_weights()  # a second time changes nothing
    x = torch.randn(4, 16)
    for part, out in zip("ab", layer.split(layer(x)), strict=True):
        expected = torch.nn.functional.linear(x, tensors[f"block.{part}.weight"], tensors[f"block.{part}.bias"])
        assert torch.allclose(out, expected, atol=1e-6)


def test_registry_finds_and_refuses() -> None:
    registry = ModelRegistry(tokenspeed_models(), broken=["plugin bad (bad 1.0) is broken: ImportError: no"])
    assert registry.architectures == tuple(sorted(profile.architecture for profile in tokenspeed_models()))
    assert registry.embedded == {"tiny": "tokenspeed_models:tiny"}
    profile = registry.find("LlamaForCausalLM")
    assert isinstance(profile, ModelProfile)
    assert model_class(profile) is LlamaForCausalLM
    problem = registry.find("MambaForCausalLM")
    assert isinstance(problem, Problem)
    for words in ("MambaForCausalLM", "Qwen3ForCausalLM", "plugin bad", "tokenspeed_models hook", "pip install"):
        assert words in problem.render()
    assert "no model plugin is installed" in str(ModelRegistry([]).find("X"))


@pytest.mark.parametrize("target", ["no_such_module:Model", "tokenspeed_models.llama:Nothing", "nonsense"])
def test_a_model_that_cannot_be_imported(target: str) -> None:
    with pytest.raises(PluginError, match="cannot be imported"):
        model_class(ModelProfile("X", target, distribution="someone", version="1"))
