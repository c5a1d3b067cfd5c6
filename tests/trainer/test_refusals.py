"""Models that `adopt` refuses, and calls that an adopted model refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.errors import StartRefused
from tokenspeed.trainer import adopt
from tokenspeed.trainer.table import MODULES

pytestmark = pytest.mark.usefixtures("one_thread")

MakeFolder = Callable[[str, torch.dtype], Path]
Load = Callable[[Path], Any]


class TestRefusals:
    """What cannot keep the promise is refused, and the model stays as it was."""

    @pytest.fixture
    def stock(self, make_folder: MakeFolder, load_trainer: Load) -> Any:
        return load_trainer(make_folder("Qwen3", torch.float32))

    def refused(self, model: Any, **options: Any) -> str:
        with pytest.raises(StartRefused) as refusal:
            adopt(model, **options)
        assert not any("forward" in vars(module) for module in model.modules())
        assert model.config._attn_implementation == "sdpa"
        return str(refusal.value)

    def test_a_model_without_weights(self, stock: Any) -> None:
        assert "the parameters are on the device meta" in self.refused(stock.to("meta"))

    def test_a_dtype_that_is_none(self, stock: Any) -> None:
        with pytest.raises(TypeError, match="dtype is 'bfloat16', expected one of torch's"):
            adopt(stock, dtype="bfloat16")  # type: ignore[arg-type]
        assert "x int8" in self.refused(stock, dtype=torch.int8)

    def test_unknown_modules_are_named(self, stock: Any) -> None:
        class Adapter(torch.nn.Linear):
            """As a library of adapters puts it in the place of a projection."""

        stock.model.layers[1].self_attn.o_proj = Adapter(192, 96)
        message = self.refused(stock)
        assert "model.layers.1.self_attn.o_proj" in message
        assert "Adapter" in message

    def test_no_kernel_with_the_feature(self, stock: Any) -> None:
        message = self.refused(stock, plugins=("tokenspeed-models", "tokenspeed-reference"))
        assert "batch_invariant" in message
        assert "add tokenspeed-kernels-aok to --plugins" in message

    def test_a_pinned_kernel_without_the_feature(self, stock: Any) -> None:
        assert "reference.gemm.linear" in self.refused(stock, kernel={"gemm.linear": "reference.gemm.linear"})

    def test_two_dtypes(self, stock: Any) -> None:
        stock.model.norm.to(torch.bfloat16)
        assert "2 dtypes" in self.refused(stock)

    def test_dropout(self, stock: Any) -> None:
        stock.model.layers[0].self_attn.attention_dropout = 0.1
        assert "attention_dropout is 0.1" in self.refused(stock)

    def test_an_architecture_without_a_table(self, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(MODULES, "Qwen3ForCausalLM")
        assert "no table of modules for Qwen3ForCausalLM" in self.refused(stock)

    def test_noise_in_the_router(self, make_folder: MakeFolder, load_trainer: Load) -> None:
        model = load_trainer(make_folder("Mixtral", torch.float32))
        model.model.layers[1].mlp.jitter_noise = 0.01
        assert "model.layers.1.mlp: router_jitter_noise is 0.01" in self.refused(model)

    def test_fp32_elsewhere_than_in_routers(self, make_folder: MakeFolder, load_trainer: Load) -> None:
        model = load_trainer(make_folder("DeepseekV3", torch.bfloat16))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
        model.model.layers[1].mlp.experts.float()
        assert "2 dtypes" in self.refused(model)

    def test_weights_that_the_configuration_does_not_describe(self, stock: Any) -> None:
        """An engine started from what this trainer saves would compute another model, or none."""
        stock.lm_head = torch.nn.Linear(96, stock.config.vocab_size, bias=True)
        stock.model.layers[2].self_attn.q_norm.weight = torch.nn.Parameter(torch.ones(16))
        message = self.refused(stock)
        assert "lm_head.bias" in message
        assert "model.layers.2.self_attn.q_norm.weight is [16], the model wants [32]" in message

    def test_unknown_architecture(self) -> None:
        import transformers

        shape = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
        assert "GPT2LMHeadModel" in self.refused(model)

    def test_no_transformers_model(self) -> None:
        with pytest.raises(TypeError, match="Linear is no transformers model"):
            adopt(torch.nn.Linear(2, 2))

    def test_attention_weights_are_not_there(self, stock: Any) -> None:
        adopt(stock)
        with pytest.raises(ValueError, match="never has attention weights"):
            stock(torch.tensor([[5, 6]]), output_attentions=True)

    def test_a_sequence_beyond_the_engines_context(self, stock: Any) -> None:
        adopt(stock)
        with pytest.raises(ValueError, match="a sequence has 513 tokens, the engine's context ends at 512"):
            stock(torch.full((1, 513), 5))

    def test_a_static_cache(self, stock: Any) -> None:
        adopt(stock)
        with pytest.raises(ValueError, match="use a DynamicCache"):
            stock.generate(torch.tensor([[5, 6]]), max_new_tokens=2, cache_implementation="static")
