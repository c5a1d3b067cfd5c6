"""The model before it has memory: it is built once to record which operators it needs, on the `meta` device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenspeed.config import EngineConfig
from tokenspeed.errors import CheckpointError
from tokenspeed.kernels.spec import WEIGHT_FORMAT, KernelSpec, Need
from tokenspeed.models.profile import ModelProfile
from tokenspeed.models.registry import model_class
from tokenspeed.numerics.resolve import ResolvedNumerics

if TYPE_CHECKING:
    from tokenspeed.engine.sampler import SamplingOperators
    from tokenspeed.layers.context import LayerContext
    from tokenspeed.loading.checkpoint import Checkpoint
    from tokenspeed.models.base import CausalLM


@dataclass(frozen=True)
class Built:
    """A model without memory, its call sites, and the engine's own operators beside them."""

    model: CausalLM
    context: LayerContext
    operators: SamplingOperators

    @property
    def dtype_name(self) -> str:
        """Dtype of weights and activations, as `bfloat16`."""
        return str(self.context.dtype).removeprefix("torch.")


def build_on_meta(
    config: EngineConfig, checkpoint: Checkpoint, profile: ModelProfile, numerics: ResolvedNumerics
) -> Built:
    """The model without memory, which records its operator needs, and the engine's own needs.

    Raises CheckpointError for a configuration that the model cannot take, PluginError when its package is broken.
    """
    import torch

    from tokenspeed.engine.sampler import SamplingOperators
    from tokenspeed.layers.context import LayerContext

    dtype = checkpoint.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    stored = weight_format(checkpoint)
    traits = {operator: dict(required) for operator, required in numerics.traits.items()}
    if stored:
        traits.setdefault("moe.experts", {})[WEIGHT_FORMAT] = stored
    context = LayerContext(dtype, numerics.switches, numerics.features, traits, weight_format=stored)
    model = build_model(checkpoint, profile, context)
    operators = SamplingOperators.ask(
        context,
        dtype,
        order=numerics.switches["logprob_order"],
        block=numerics.logprob_block(model.vocab_size),
    )
    return Built(model, context, operators)


def build_model(checkpoint: Checkpoint, profile: ModelProfile, context: LayerContext) -> CausalLM:
    # A kernel that reads the checkpoint's weight format is selected by trait; the layers' shapes do not change.
    plain = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    return model_class(profile)(plain, context)


def weight_format(checkpoint: Checkpoint) -> str:
    """How a quantised checkpoint stores its weights, as kernels declare it (`fp8`, `method:format`); empty if plain."""
    quantisation = checkpoint.config.get("quantization_config")
    if not quantisation:
        return ""
    if not isinstance(quantisation, Mapping):
        raise CheckpointError(f"config.json: quantization_config={quantisation!r} is not an object")
    parts = [quantisation.get("quant_method", "unknown"), quantisation.get("format", "")]
    return ":".join(part for part in parts if part)


def store_as_kernels_read(model: CausalLM, choices: Mapping[Need, KernelSpec]) -> None:
    """Let projections hold the tensors that their kernels' weight format has in the place of a weight."""
    from tokenspeed.layers.linear import Linear

    for _, layer in model.weight_layers():
        if isinstance(layer, Linear) and (spec := choices.get(layer.linear.need)) and spec.stored:
            layer.store_as(spec.stored)
