"""Which modules of a `transformers` model can be adopted, and what each gets from the engine's layer in its place.

Every class of module of a stock model is listed, for each architecture; one that is not listed is not adopted, since
its arithmetic is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tokenspeed.kernels.spec import KernelSpec, Need
from tokenspeed.layers.attention import SelfAttention
from tokenspeed.layers.context import Operation
from tokenspeed.layers.linear import Linear
from tokenspeed.layers.mla import LatentAttention
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.moe import Experts, Router
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.rope import RotaryEmbedding
from tokenspeed.layers.sparse import Indexer, SparseLatentAttention
from tokenspeed.models.base import CausalLM
from tokenspeed.trainer import mla, modules, moe, sparse
from tokenspeed.trainer.angles import Angles

_ENGINE_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""Projections that the engine keeps as one, where it does."""


@dataclass(frozen=True)
class Twin:
    """The engine's model without memory, the kernel of each of its call sites, and its dtype.

    `adopted` is the trainer's model, and `table` the entries of its architecture.
    """

    model: CausalLM
    choices: Mapping[Need, KernelSpec]
    dtype: torch.dtype
    adopted: nn.Module
    table: Mapping[type, Entry]
    _angles: dict[RotaryEmbedding, Angles] = field(default_factory=dict)

    def angles(self, rotary: RotaryEmbedding) -> Angles:
        """The angles of a rotary embedding: one table for all layers that share it."""
        return self._angles.setdefault(rotary, Angles(rotary.scaling, rotary.rotary_dim))

    def kernel(self, operation: Operation) -> str:
        """The name of a call site's kernel."""
        return self.choices[operation.need].name

    def at(self, path: str) -> nn.Module:
        """The engine's layer that does the work of the trainer's module `path`; several projections may be one.

        A router's classifier is the router. Raises AttributeError where the engine has nothing of that name.
        """
        parent, _, name = path.rpartition(".")
        if name == "classifier":
            return self.model.get_submodule(parent)
        owner = self.model.get_submodule(parent)
        return owner.get_submodule(name if hasattr(owner, name) else _ENGINE_NAMES.get(name, name))


Exchange = Callable[[Any, Any, Twin], Any]
"""(the trainer's module, the engine's layer, twin) -> plan, or None to leave the module as it is.

Raises ValueError where the two do not agree.
"""


@dataclass(frozen=True)
class Entry:
    """How a class of modules is adopted: its new forward, and what makes its plan. Without either it stays as it is.

    `keeps_fp32`: its parameters may be fp32 in a model of another dtype, and then are so in the engine.
    """

    forward: Callable[..., Any] | None = None
    plan: Exchange | None = None
    keeps_fp32: bool = False


def _linear(_module: nn.Linear, layer: Any, twin: Twin) -> modules.KernelPlan | None:
    # Latent attention and routers read the weights of such projections and call none of them.
    return modules.KernelPlan(twin.kernel(layer.linear)) if isinstance(layer, Linear) else None


def _decoder(_module: Any, _layer: Any, twin: Twin) -> modules.DecoderPlan:
    forwards = {kind: entry.forward for kind, entry in twin.table.items()}
    return modules.DecoderPlan(twin.model.max_positions, twin.dtype, twin.adopted, forwards)


def _norm(module: Any, layer: RMSNorm, twin: Twin) -> modules.KernelPlan:
    if module.variance_epsilon != layer.eps:
        raise ValueError(f"variance_epsilon is {module.variance_epsilon}, the configuration says {layer.eps}")
    return modules.KernelPlan(twin.kernel(layer.rms))


def _mlp(_module: Any, layer: GatedMLP, twin: Twin) -> modules.KernelPlan:
    return modules.KernelPlan(twin.kernel(layer.silu_and_mul))


def _attention(module: Any, layer: SelfAttention, twin: Twin) -> modules.AttentionPlan:
    _no_dropout(module)
    attention, rotary = layer.attention, layer.rotary
    return modules.AttentionPlan(
        rope=twin.kernel(rotary.rope),
        write=twin.kernel(attention.write),
        attend=twin.kernel(attention.attend),
        scale=attention.scale,
        window=attention.window,
        angles=twin.angles(rotary),
        interleaved=rotary.interleaved,
    )


def _latent_attention(module: Any, layer: LatentAttention, twin: Twin) -> mla.LatentPlan:
    _no_dropout(module)
    return mla.LatentPlan(
        rope=twin.kernel(layer.rotary.rope),
        absorb=twin.kernel(layer.kv_b_proj.absorb),
        write=twin.kernel(layer.write),
        attend=twin.kernel(layer.attend),
        expand=twin.kernel(layer.kv_b_proj.expand),
        shape=layer.shape,
        scale=layer.scale,
        angles=twin.angles(layer.rotary),
        interleaved=layer.rotary.interleaved,
        lora_scales=layer.lora_scales,
    )


def _sparse_attention(module: Any, layer: SparseLatentAttention, twin: Twin) -> sparse.SparsePlan:
    if (module.indexer is None) != (layer.indexer is None):
        raise ValueError("the configuration says otherwise which layers have an indexer")
    return sparse.SparsePlan(_latent_attention(module, layer, twin), layer.order)


def _indexer(module: Any, layer: Indexer, twin: Twin) -> sparse.IndexerPlan:
    if module.k_norm.eps != layer.k_norm.eps:
        raise ValueError(f"the epsilon of k_norm is {module.k_norm.eps}, the engine's {layer.k_norm.eps}")
    return sparse.IndexerPlan(
        norm=twin.kernel(layer.k_norm.norm),
        rope=twin.kernel(layer.rotary.rope),
        write=twin.kernel(layer.write),
        score=twin.kernel(layer.score),
        choose=twin.kernel(layer.choose),
        shape=layer.shape,
        norm_eps=layer.k_norm.eps,
        angles=twin.angles(layer.rotary),
        interleaved=layer.rotary.interleaved,
    )


def _no_dropout(module: Any) -> None:
    if module.attention_dropout:
        raise ValueError(f"attention_dropout is {module.attention_dropout}; the engine drops nothing out, set it to 0")


def _router(_module: Any, layer: Router, twin: Twin) -> moe.RouterPlan:
    return moe.RouterPlan(twin.kernel(layer.linear), twin.kernel(layer.route), layer.routing, layer.form, layer.dtype)


def _experts(_module: Any, layer: Experts, twin: Twin) -> moe.ExpertsPlan:
    return moe.ExpertsPlan(twin.kernel(layer.experts), layer.order)


def _without_jitter(module: Any, _layer: Any, _twin: Twin) -> None:
    if module.jitter_noise:
        raise ValueError(f"router_jitter_noise is {module.jitter_noise}; the engine adds no noise, set it to 0")


_UNCHANGED = Entry()
_ATTENTION = Entry(modules.attention_forward, _attention)
_LATENT_ATTENTION = Entry(mla.latent_attention_forward, _latent_attention)
_MLP = Entry(modules.mlp_forward, _mlp)
_NORM = Entry(modules.norm_forward, _norm)
_DECODER = Entry(modules.decoder_forward, _decoder)
_LAYER = Entry(modules.layer_forward)
_ROUTER = Entry(moe.router_forward, _router, keeps_fp32=True)
_EXPERTS = Entry(moe.experts_forward, _experts)
_INDEXER = Entry(sparse.indexer_forward, _indexer)
_INDEXER_NORM = {"torch.nn.modules.normalization:LayerNorm": _UNCHANGED}  # its indexer reads the parameters

_COMMON: Mapping[str, Entry] = {
    "torch.nn.modules.linear:Linear": Entry(modules.linear_forward, _linear),
    "torch.nn.modules.linear:Identity": _UNCHANGED,
    "torch.nn.modules.sparse:Embedding": _UNCHANGED,  # copies rows, which is exact
    "torch.nn.modules.container:ModuleList": _UNCHANGED,
    "torch.nn.modules.activation:SiLU": _UNCHANGED,  # not called: the MLP is exchanged as a whole
    "transformers.activations:SiLUActivation": _UNCHANGED,  # likewise
}


def _table(name: str, prefix: str, **own: Entry) -> Mapping[str, Entry]:
    """The classes `prefix...` of `transformers.models.name`: those that every architecture has, and its `own`."""
    classes = {
        "ForCausalLM": _UNCHANGED,
        "Model": _DECODER,
        "DecoderLayer": _LAYER,
        "RotaryEmbedding": _UNCHANGED,  # its result is not read
        "RMSNorm": _NORM,
        **own,
    }
    module = f"transformers.models.{name}.modeling_{name}"
    return {**_COMMON, **{f"{module}:{prefix}{suffix}": entry for suffix, entry in classes.items()}}


_DEEPSEEK_MOE: Mapping[str, Entry] = {
    "MLP": _MLP,
    "MoE": _UNCHANGED,  # adds the shared experts in the model's dtype, as the engine does
    "TopkRouter": _ROUTER,
    "Experts": _EXPERTS,
}


def _sparse(name: str, prefix: str, forward: Callable[..., Any]) -> Mapping[str, Entry]:
    attention = Entry(forward, _sparse_attention)
    return {**_INDEXER_NORM, **_table(name, prefix, Attention=attention, Indexer=_INDEXER, **_DEEPSEEK_MOE)}


MODULES: Mapping[str, Mapping[str, Entry]] = {
    "LlamaForCausalLM": _table("llama", "Llama", Attention=_ATTENTION, MLP=_MLP),
    "Qwen2ForCausalLM": _table("qwen2", "Qwen2", Attention=_ATTENTION, MLP=_MLP),
    "Qwen3ForCausalLM": _table("qwen3", "Qwen3", Attention=_ATTENTION, MLP=_MLP),
    "Qwen3MoeForCausalLM": _table(
        "qwen3_moe",
        "Qwen3Moe",
        Attention=_ATTENTION,
        MLP=_MLP,
        SparseMoeBlock=_UNCHANGED,  # hands what the router chose to the experts
        TopKRouter=_ROUTER,
        Experts=_EXPERTS,
    ),
    "MixtralForCausalLM": _table(
        "mixtral",
        "Mixtral",
        Attention=_ATTENTION,
        SparseMoeBlock=Entry(plan=_without_jitter),
        TopKRouter=_ROUTER,
        Experts=_EXPERTS,
    ),
    "DeepseekV3ForCausalLM": _table("deepseek_v3", "DeepseekV3", Attention=_LATENT_ATTENTION, **_DEEPSEEK_MOE),
    "DeepseekV32ForCausalLM": _sparse("deepseek_v32", "DeepseekV32", sparse.sparse_attention_forward),
    "GlmMoeDsaForCausalLM": _sparse("glm_moe_dsa", "GlmMoeDsa", sparse.sharing_attention_forward),
    "LongcatFlashForCausalLM": _table("longcat_flash", "LongcatFlash", MLA=_LATENT_ATTENTION, **_DEEPSEEK_MOE),
}
"""For each architecture, every class of module that a stock model of it may hold, and what becomes of it."""
