"""What becomes of an adopted model whose modules are changed afterwards: by adapters, replacements and wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tokenspeed.trainer import adopt, forget_packed_weights, restore

pytestmark = pytest.mark.usefixtures("one_thread")

MakeFolder = Callable[[str, torch.dtype], Path]
Load = Callable[[Path], Any]


class LowRank(torch.nn.Module):
    """A projection with an adapter beside it, wrapped as PEFT wraps it; `merge` writes as PEFT writes."""

    def __init__(self, base_layer: torch.nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base_layer
        generator = torch.Generator().manual_seed(1)
        down = torch.randn(rank, base_layer.in_features, generator=generator) / 5
        up = torch.randn(base_layer.out_features, rank, generator=generator) / 5
        self.lora_A, self.lora_B = torch.nn.Parameter(down), torch.nn.Parameter(up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delta = torch.nn.functional.linear(torch.nn.functional.linear(x, self.lora_A), self.lora_B)
        return self.base_layer(x) + delta

    def merge(self) -> torch.nn.Linear:
        self.base_layer.weight.data += self.lora_B.data @ self.lora_A.data
        return self.base_layer


class TestChangedAfterwards:
    """An adopted model whose modules are no longer what was adopted is refused when it is called, and never differs."""

    IDS = torch.arange(5, 133).unsqueeze(0)

    @pytest.fixture
    def adopted(self, make_folder: MakeFolder, load_trainer: Load) -> Any:
        model = load_trainer(make_folder("Llama", torch.float32)).eval()
        adopt(model)
        return model

    @torch.no_grad()
    def test_an_adapter(self, adopted: Any) -> None:
        before = adopted(self.IDS).logits
        attention = adopted.model.layers[1].self_attn
        attention.q_proj = LowRank(attention.q_proj)
        with pytest.raises(ValueError, match="not those that were adopted") as refusal:
            adopted(self.IDS)
        stranger, remedy = str(refusal.value).splitlines()[1:]
        assert stranger.endswith("LowRank")
        assert "model.layers.1.self_attn.q_proj: " in stranger
        assert "merge adapters into the model" in remedy
        # Merged, it is a model like any other, whose weights were written behind torch's back.
        attention.q_proj = attention.q_proj.merge()
        merged = adopted(self.IDS).logits
        assert not torch.equal(merged, before)
        restore(adopted)
        adopt(adopted)
        forget_packed_weights(adopted)
        assert torch.equal(adopted(self.IDS).logits, merged)

    @torch.no_grad()
    @pytest.mark.parametrize("part", ["lm_head", "mlp", "forward", "embedding", "shape"])
    def test_a_replaced_part(self, adopted: Any, part: str) -> None:
        layer = adopted.model.layers[0]
        if part == "lm_head":
            adopted.lm_head = LowRank(adopted.lm_head)
        elif part == "mlp":
            layer.mlp = type(layer.mlp)(adopted.config)
        elif part == "forward":
            layer.mlp.up_proj.forward = partial(torch.nn.Linear.forward, layer.mlp.up_proj)
        elif part == "embedding":
            adopted.model.embed_tokens.forward = partial(torch.nn.Embedding.forward, adopted.model.embed_tokens)
        else:
            adopted.resize_token_embeddings(adopted.config.vocab_size + 8)
        with pytest.raises(ValueError, match="not those that were adopted"):
            adopted(self.IDS)

    @torch.no_grad()
    def test_copies_are_looked_at_by_themselves(self, adopted: Any) -> None:
        copied = copy.deepcopy(adopted)
        copied.lm_head = LowRank(copied.lm_head)
        adopted(self.IDS)
        with pytest.raises(ValueError, match=r"lm_head: .*LowRank"):
            copied(self.IDS)

    @torch.no_grad()
    def test_wrappers_that_compute_nothing(self, adopted: Any) -> None:
        expected = adopted(self.IDS).logits
        adopted.model.layers[0] = checkpoint_wrapper(adopted.model.layers[0])
        sharded = adopted.model.layers[1].mlp
        sharded.__class__ = type("FSDPMLP", (type(sharded),), {"__module__": "torch.distributed.fsdp"})
        adopted.forward = partial(type(adopted).forward, adopted)
        assert torch.equal(adopted(self.IDS).logits, expected)

    def test_restored_inside_what_wraps_it(self, adopted: Any) -> None:
        restore(torch.nn.Sequential(adopted))
        assert "forward" not in vars(adopted.lm_head)
        with pytest.raises(ValueError, match="is not adopted"):
            restore(adopted)
