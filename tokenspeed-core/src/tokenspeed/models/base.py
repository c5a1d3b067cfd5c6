"""What every model is: token ids in, hidden states and logits out, and weights that know their checkpoint names.

A model is built on the `meta` device: it has shapes and operator needs but no memory. Then the plan binds its
operations, `loading.checkpoint` fills it, and it runs. It knows nothing of requests, scheduling or sampling.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.layers.attention import CachedAttention, KVSpec
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.weights import Bundle, TensorTarget, WeightLayer

__all__ = ["CausalLM", "KVSpec"]


class CausalLM(nn.Module):
    """A causal language model. Subclasses build their layers in `__init__` and implement the two computations.

    Attributes that a subclass sets: `vocab_size`, and `max_positions`, the longest context in tokens.
    `ignored_tensors` are patterns (searched) of checkpoint tensors that are no weights and may be left out.
    """

    vocab_size: int
    max_positions: int
    ignored_tensors: tuple[str, ...] = ()

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], ctx: LayerContext) -> None:
        """Build from a checkpoint's `config.json`; CheckpointError where it asks for something unsupported."""
        super().__init__()

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Normalised hidden states [T,H] of all tokens; writes the KV cache."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R,V], in the model's dtype, of rows [R,H] of what `forward` returned."""

    def kv_specs(self) -> list[KVSpec]:
        """What each layer caches, in the order of `ForwardBatch.kv_caches`."""
        attentions = [module for module in self.modules() if isinstance(module, CachedAttention)]
        return [attention.kv_spec for attention in sorted(attentions, key=lambda attention: attention.layer)]

    def weight_layers(self) -> Iterator[tuple[str, WeightLayer]]:
        """Every layer with weights or tables of its own, by its name in the model."""
        for name, module in self.named_modules():
            if isinstance(module, WeightLayer):
                yield name, module

    def choose_forms(self, stored: Collection[str]) -> None:
        """Expect the tensors in the form in which a checkpoint with these names stores them (experts one by one, or
        stacked). Without it `checkpoint_tensors` names the form that is usual for the architecture."""
        for prefix, layer in self.weight_layers():
            layer.choose_form(prefix, stored)

    def checkpoint_tensors(self) -> dict[str, TensorTarget]:
        """Where each tensor of a checkpoint goes. Ask before the weights are prepared."""
        return {
            name: target for prefix, layer in self.weight_layers() for name, target in layer.checkpoint_tensors(prefix)
        }

    def bundles(self) -> dict[str, Bundle]:
        """What a trainer's model may hold in the place of a checkpoint's tensors, by name."""
        return {name: bundle for prefix, layer in self.weight_layers() for name, bundle in layer.bundles(prefix)}

    def tables(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Constant tables that layers compute (rotary angles), by their name in the model, for the certificate."""
        for prefix, layer in self.weight_layers():
            yield from ((f"{prefix}.{name}", table) for name, table in layer.tables())

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold tensor `name` without the model using it."""
        return any(re.search(pattern, name) for pattern in self.ignored_tensors)

    def limit_context(self, tokens: int) -> None:
        """Let layers make their tables for contexts of at most `tokens` tokens: what an engine serves may be less than
        `max_positions`. Call it before `allocate`."""
        for _, layer in self.weight_layers():
            layer.limit_context(tokens)

    def allocate(self, device: torch.device | str = "cpu") -> None:
        """Give every layer that has no memory yet its memory, uninitialised."""
        for _, layer in self.weight_layers():
            layer.allocate(torch.device(device))

    def prepare_weights(self) -> None:
        """Pack the weights of every layer that is not packed yet for its kernels, one layer after another."""
        for _, layer in self.weight_layers():
            layer.prepare_weights()
