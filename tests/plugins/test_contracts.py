"""Our own distributions under the conformance kit, through the same classes that a stranger's tests use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.testing import KernelContractTests, ModelContractTests, PluginTests


class TestAokKernels(KernelContractTests):
    plugin = "tokenspeed-kernels-aok"
    at_least = 12


class TestReferenceKernels(KernelContractTests):
    plugin = "tokenspeed-reference"
    at_least = 12


class TestAok(PluginTests):
    plugin = "tokenspeed-kernels-aok"
    import_kernels = False  # those of the Triton kernels need triton


class TestReference(PluginTests):
    plugin = "tokenspeed-reference"


class TestFlashinfer(PluginTests):
    plugin = "tokenspeed-kernels-flashinfer"
    import_kernels = False  # they need flashinfer; tests/plugins/test_flashinfer.py has a stand-in


class TestModels(PluginTests):
    plugin = "tokenspeed-models"


@cache
def _transformer(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class _AgainstTransformers(ModelContractTests):
    """`folder` is set for each test by the fixture of a subclass."""

    folder: Path

    def checkpoint(self) -> Path:
        return self.folder

    def reference_logits(self, checkpoint: Path, ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = _transformer(checkpoint)(torch.tensor([list(ids)])).logits[0]
        return logits


@pytest.mark.usefixtures("one_thread")
class TestLlama(_AgainstTransformers):
    architecture = "LlamaForCausalLM"

    @pytest.fixture(autouse=True)
    def _folder(self, tiny_llama: Path) -> None:
        self.folder = tiny_llama


@pytest.mark.usefixtures("one_thread")
class TestQwen2(_AgainstTransformers):
    architecture = "Qwen2ForCausalLM"

    @pytest.fixture(autouse=True)
    def _folder(self, make_checkpoint: Any) -> None:
        self.folder = make_checkpoint("Qwen2", tie_word_embeddings=False)


@pytest.mark.usefixtures("one_thread")
class TestQwen3(_AgainstTransformers):
    architecture = "Qwen3ForCausalLM"

    @pytest.fixture(autouse=True)
    def _folder(self, tiny_qwen3: Path) -> None:
        self.folder = tiny_qwen3


@pytest.mark.usefixtures("one_thread")
class TestGlmMoeDsa(_AgainstTransformers):
    """Layers that share a choice, experts and a cache plane for the indexer."""

    architecture = "GlmMoeDsaForCausalLM"

    @pytest.fixture(autouse=True)
    def _folder(self, make_checkpoint: Any) -> None:
        self.folder = make_checkpoint(
            "GlmMoeDsa",
            num_key_value_heads=6,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            first_k_dense_replace=1,
            kv_lora_rank=24,
            q_lora_rank=40,
            qk_nope_head_dim=20,
            qk_rope_head_dim=8,
            v_head_dim=12,
            index_n_heads=18,
            index_head_dim=14,
            index_topk=11,
            indexer_types=["full", "shared", "full"],
        )
