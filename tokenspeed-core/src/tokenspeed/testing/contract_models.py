"""`ModelContractTests`: a model is what its checkpoint and a trusted implementation say. Needs pytest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from tokenspeed.kernels.spec import BATCH_INVARIANT, KernelSpec, Need
from tokenspeed.layers.context import LayerContext
from tokenspeed.loading.checkpoint import Checkpoint
from tokenspeed.machine import read_machine
from tokenspeed.models.base import CausalLM
from tokenspeed.models.profile import ModelProfile
from tokenspeed.models.registry import model_class
from tokenspeed.plugins import load_plugins
from tokenspeed.testing.memory import same_bits
from tokenspeed.testing.models import PagedModel, bind_kernels
from tokenspeed.testing.subject import not_here


class ModelContractTests:
    """Subclass it as `TestModel`, name the architecture, and implement `checkpoint` and `reference_logits`.

    `tolerance` is the largest difference of a logit from the reference's, relative to the largest logit, in fp32.
    """

    architecture: ClassVar[str]
    tolerance: ClassVar[float] = 2e-4
    tokens: ClassVar[int] = 40

    def checkpoint(self) -> Path:
        """A small checkpoint of the architecture in fp32, random weights will do; made once and kept."""
        raise NotImplementedError

    def reference_logits(self, checkpoint: Path, ids: Sequence[int]) -> torch.Tensor:
        """Logits [n,V] after each of `ids` by an implementation that you trust."""
        raise NotImplementedError

    def profile(self) -> ModelProfile:
        """What the plugin states about the architecture."""
        found = [profile for profile in load_plugins().models() if profile.architecture == self.architecture]
        assert found, f"no installed plugin states a profile of {self.architecture}"
        return found[0]

    def ids(self, seed: int = 1) -> list[int]:
        """Token ids of the vocabulary."""
        size = int(Checkpoint(self.checkpoint()).config["vocab_size"])
        return torch.randint(size, (self.tokens,), generator=torch.Generator().manual_seed(seed)).tolist()

    def build(self, kernels: Iterable[KernelSpec] | None = None) -> tuple[CausalLM, LayerContext]:
        """The model, filled, over `kernels` (None: the reference kernels)."""
        checkpoint = Checkpoint(self.checkpoint())
        context = LayerContext(torch.float32)
        model = model_class(self.profile())(checkpoint.config, context)
        bind_kernels(context, kernels)
        checkpoint.load(model)
        return model, context

    def test_weight_names_and_shapes(self) -> None:
        """The model takes every tensor of the checkpoint, and wants no other."""
        checkpoint = Checkpoint(self.checkpoint())
        assert checkpoint.architecture == self.architecture
        checkpoint.check(model_class(self.profile())(checkpoint.config, LayerContext(torch.float32)))

    def test_logits_are_those_of_the_reference(self) -> None:
        """Teacher-forced logits of a whole sequence."""
        ids = self.ids()
        model, _ = self.build()
        got = PagedModel(model).feed({0: ids})[0]
        expected = self.reference_logits(self.checkpoint(), ids)
        assert got.shape == expected.shape
        assert float((got - expected).abs().max()) <= self.tolerance * float(expected.abs().max())

    def test_chunked_is_whole_and_decode_is_prefill(self) -> None:
        """In chunks, token by token, and beside others: bit for bit over batch-invariant kernels, else closely."""
        machine = read_machine()
        kernels = [k for k in load_plugins().kernels() if BATCH_INVARIANT in k.features and not not_here(k, machine)]
        model, _ = self.build(kernels or None)
        ids, others = self.ids(), self.ids(2)
        whole = PagedModel(model).feed({0: ids})[0]
        chunked, decoded, beside = PagedModel(model), PagedModel(model), PagedModel(model)
        found = {
            "chunked": torch.cat([chunked.feed({0: part})[0] for part in (ids[:7], ids[7:16], ids[16:])]),
            "decoded": torch.cat([decoded.feed({0: [token]})[0] for token in ids]),
            "beside others": beside.feed({1: others, 0: ids, 2: others[:5]})[0],
        }
        for what, logits in found.items():
            if kernels:
                assert same_bits(logits, whole), f"{what}: {int((logits != whole).sum())} logits differ from whole"
            else:
                assert float((logits - whole).abs().max()) <= self.tolerance * float(whole.abs().max()), what

    def test_needs_declared_are_needs_used(self) -> None:
        """Every operator that layers ask for is called; one that is not would be demanded in vain."""
        model, context = self.build()
        used: set[Need] = set()
        for operation in context.operations:
            run = operation.run

            def counted(*args: object, _run: object = run, _need: Need = operation.need) -> object:
                used.add(_need)
                return _run(*args)  # type: ignore[operator]

            operation.run = counted
        PagedModel(model).feed({0: self.ids()})
        assert set(context.needs()) == used
