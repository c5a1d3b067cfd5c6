"""`adopt` and `restore`: exchange the forwards of a Hugging Face model's modules, instance by instance.

Which kernel goes where comes from the engine: its own model is built from the same configuration on the meta device,
asks for its operators, and the ordinary selection answers under `rl-bitwise`. Its layers also give the rotary tables,
scales and windows, so nothing is stated twice. Every module of the trainer's model must be in the table `MODULES`; one
that is not (an adapter, a subclass, a quantised layer) is refused by name, since its arithmetic is unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from tokenspeed.errors import CheckpointError, PluginError, Problem, StartRefused
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import Pins, select
from tokenspeed.kernels.spec import KernelSpec, Need
from tokenspeed.layers.attention import SelfAttention
from tokenspeed.layers.context import LayerContext, Operation
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.machine import read_machine
from tokenspeed.models.base import CausalLM
from tokenspeed.models.profile import ModelProfile
from tokenspeed.models.registry import ModelRegistry, model_class
from tokenspeed.numerics.resolve import resolve
from tokenspeed.plugins import load_plugins
from tokenspeed.trainer import kernels, modules

ENVELOPE = "rl-bitwise"
ATTENTION = "tokenspeed"
"""Name of the attention implementation that an adopted model is set to."""

_PLAN = "tokenspeed_plan"
_ADOPTION = "tokenspeed_adoption"


@dataclass(frozen=True)
class Adoption:
    """What `adopt` did. `kernels` maps each operator to the names of its kernels, `modules` counts what was exchanged.

    `attention` is the implementation that the model had before.
    """

    architecture: str
    dtype: str
    kernels: Mapping[str, tuple[str, ...]]
    modules: Mapping[str, int]
    attention: str


@dataclass(frozen=True)
class _Twin:
    """The engine's model without memory, and the kernel of each of its call sites."""

    model: CausalLM
    choices: Mapping[Need, KernelSpec]

    def kernel(self, operation: Operation) -> str:
        return self.choices[operation.need].name

    def at(self, path: str) -> nn.Module:
        """The engine's layer that does the work of the trainer's module `path`; several projections may be one."""
        parent, _, name = path.rpartition(".")
        merged = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
        merged |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        return self.model.get_submodule(f"{parent}.{merged.get(name, name)}" if parent else name)


Exchange = Callable[[Any, Any, _Twin], Any]
"""(the trainer's module, the engine's layer, twin) -> plan. Raises ValueError where the two do not agree."""


def _linear(_module: nn.Linear, layer: Any, twin: _Twin) -> modules.KernelPlan:
    return modules.KernelPlan(twin.kernel(layer.linear))


def _norm(module: Any, layer: RMSNorm, twin: _Twin) -> modules.KernelPlan:
    if module.variance_epsilon != layer.eps:
        raise ValueError(f"variance_epsilon is {module.variance_epsilon}, the configuration says {layer.eps}")
    return modules.KernelPlan(twin.kernel(layer.rms))


def _mlp(_module: Any, layer: GatedMLP, twin: _Twin) -> modules.KernelPlan:
    return modules.KernelPlan(twin.kernel(layer.silu_and_mul))


def _attention(module: Any, layer: SelfAttention, twin: _Twin) -> modules.AttentionPlan:
    if module.attention_dropout:
        raise ValueError(f"attention_dropout is {module.attention_dropout}; the engine drops nothing out, set it to 0")
    attention, rotary = layer.attention, layer.rotary
    if rotary.table is None:  # one instance serves all layers
        rotary.allocate(torch.device("cpu"))
    assert rotary.table is not None
    return modules.AttentionPlan(
        rope=twin.kernel(rotary.rope),
        write=twin.kernel(attention.write),
        attend=twin.kernel(attention.attend),
        scale=attention.scale,
        window=attention.window,
        table=rotary.table,
    )


@dataclass(frozen=True)
class _Entry:
    """How a class of modules is adopted: its new forward, and what makes its plan. Without either it stays as it is."""

    forward: Callable[..., Any] | None = None
    plan: Exchange | None = None


_UNCHANGED = _Entry()
_ATTENTION = _Entry(modules.attention_forward, _attention)
_MLP = _Entry(modules.mlp_forward, _mlp)
_NORM = _Entry(modules.norm_forward, _norm)
_DECODER = _Entry(modules.decoder_forward)

_COMMON: Mapping[str, _Entry] = {
    "torch.nn.modules.linear:Linear": _Entry(modules.linear_forward, _linear),
    "torch.nn.modules.sparse:Embedding": _UNCHANGED,  # copies rows, which is exact
    "torch.nn.modules.container:ModuleList": _UNCHANGED,
    "torch.nn.modules.activation:SiLU": _UNCHANGED,  # not called: the MLP is exchanged as a whole
    "transformers.activations:SiLUActivation": _UNCHANGED,  # likewise
}

_LLAMA, _QWEN2, _QWEN3 = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3"))

MODULES: Mapping[str, Mapping[str, _Entry]] = {
    "LlamaForCausalLM": {
        **_COMMON,
        f"{_LLAMA}:LlamaForCausalLM": _UNCHANGED,
        f"{_LLAMA}:LlamaModel": _DECODER,
        f"{_LLAMA}:LlamaDecoderLayer": _UNCHANGED,  # adds the residual in the model's dtype, as the engine does
        f"{_LLAMA}:LlamaRotaryEmbedding": _UNCHANGED,  # its result is not read
        f"{_LLAMA}:LlamaAttention": _ATTENTION,
        f"{_LLAMA}:LlamaMLP": _MLP,
        f"{_LLAMA}:LlamaRMSNorm": _NORM,
    },
    "Qwen2ForCausalLM": {
        **_COMMON,
        f"{_QWEN2}:Qwen2ForCausalLM": _UNCHANGED,
        f"{_QWEN2}:Qwen2Model": _DECODER,
        f"{_QWEN2}:Qwen2DecoderLayer": _UNCHANGED,
        f"{_QWEN2}:Qwen2RotaryEmbedding": _UNCHANGED,
        f"{_QWEN2}:Qwen2Attention": _ATTENTION,
        f"{_QWEN2}:Qwen2MLP": _MLP,
        f"{_QWEN2}:Qwen2RMSNorm": _NORM,
    },
    "Qwen3ForCausalLM": {
        **_COMMON,
        f"{_QWEN3}:Qwen3ForCausalLM": _UNCHANGED,
        f"{_QWEN3}:Qwen3Model": _DECODER,
        f"{_QWEN3}:Qwen3DecoderLayer": _UNCHANGED,
        f"{_QWEN3}:Qwen3RotaryEmbedding": _UNCHANGED,
        f"{_QWEN3}:Qwen3Attention": _ATTENTION,
        f"{_QWEN3}:Qwen3MLP": _MLP,
        f"{_QWEN3}:Qwen3RMSNorm": _NORM,
    },
}
"""For each architecture, every class of module that a stock model of it may hold, and what becomes of it."""


def adopt(
    model: nn.Module, *, plugins: tuple[str, ...] | None = None, kernel: Mapping[str, str] | None = None
) -> Adoption:
    """Make `model`, a `transformers` causal language model, compute the logits of an engine under `rl-bitwise`.

    In place; parameters stay where they are and gradients flow as before. Any batch shape is read: one sequence in a
    row, padded left or right, or packed with `position_ids` that start again. All parameters must have one dtype, the
    engine's. `plugins` and `kernel` are the engine's options of these names.

    Raises StartRefused with every reason: an architecture, module or setting that is not in the table, or an operator
    that no installed kernel offers with the required features. The model is then as it was.
    """
    import transformers

    if hasattr(model, _ADOPTION):
        raise ValueError("this model is adopted already; `restore` it first")
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"{type(model).__name__} is no transformers model")
    twin, dtype = _plan_twin(model, plugins, kernel or {})
    planned = list(_plan_modules(model, twin))
    kernels.load(twin.choices.values())

    # Registering a name changes nothing for models that do not ask for it.
    transformers.AttentionInterface.register(ATTENTION, modules.no_attention)
    transformers.AttentionMaskInterface.register(ATTENTION, modules.no_mask)
    adoption = Adoption(
        type(model).__name__,
        str(dtype).removeprefix("torch."),
        _names_by_operator(twin.choices.values()),
        _counts(module for module, _, _ in planned),
        model.config._attn_implementation,
    )
    model.set_attn_implementation(ATTENTION)
    for module, forward, plan in planned:
        module.forward = MethodType(forward, module)
        if plan is not None:
            setattr(module, _PLAN, plan)
    setattr(model, _ADOPTION, adoption)
    return adoption


def restore(model: nn.Module) -> None:
    """Undo `adopt`: every module has its class's own forward again. Raises ValueError when the model is not adopted."""
    adoption: Adoption | None = getattr(model, _ADOPTION, None)
    if adoption is None:
        raise ValueError("this model is not adopted")
    exchanged = {entry.forward for entry in MODULES[adoption.architecture].values() if entry.forward is not None}
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) in exchanged:
            del module.forward
        module.__dict__.pop(_PLAN, None)
    delattr(model, _ADOPTION)
    restored: Any = model
    restored.set_attn_implementation(adoption.attention)


def _plan_twin(model: Any, plugins: tuple[str, ...] | None, pins: Mapping[str, str]) -> tuple[_Twin, torch.dtype]:
    """The engine's model of the same configuration and its kernels. Raises StartRefused."""
    host = load_plugins(plugins)
    registry = KernelRegistry.from_plugins(host)
    dtype, device = _one(model, "dtype"), _one(model, "device")
    resolution = resolve(
        ENVELOPE, "transformers", profiles=host.trainer_profiles(), kernels=registry, device=device.type
    )
    problems = [*host.problems, *resolution.problems]
    profile = ModelRegistry.from_plugins(host).find(type(model).__name__)
    if isinstance(profile, Problem):
        raise StartRefused([*problems, profile])
    problems += _gate(profile)
    numerics = resolution.numerics
    ctx = LayerContext(dtype, numerics.switches, numerics.features, numerics.traits)
    try:
        built = model_class(profile)(model.config.to_dict(), ctx)
    except (CheckpointError, PluginError) as error:
        raise StartRefused([*problems, Problem("adoption", str(error))]) from error
    wanted = [operation for operation in ctx.operations if operation.need.operator != "embedding.lookup"]
    selection = select(
        dict.fromkeys(operation.need for operation in wanted), registry, read_machine(device.type), Pins(pins)
    )
    if problems := [*problems, *selection.problems]:
        raise StartRefused(problems)
    return _Twin(built, selection.choices), dtype


def _one(model: nn.Module, what: str) -> Any:
    """The dtype or device of all parameters. Raises StartRefused when there are several."""
    found = {getattr(parameter, what): name for name, parameter in model.named_parameters()}
    if len(found) != 1:
        examples = tuple(f"{value}: {name}" for value, name in found.items())
        summary = f"the parameters have {len(found)} {what}s, an engine has one"
        raise StartRefused([Problem("adoption", summary, examples, f"convert the model to one {what} first")])
    return next(iter(found))


def _gate(profile: ModelProfile) -> Iterable[Problem]:
    if ENVELOPE not in profile.numerics_envelopes:
        listed = ", ".join(sorted(profile.numerics_envelopes)) or "none"
        yield Problem(
            "profile",
            f"the profile of {profile.architecture} ({profile.distribution} {profile.version}) lists {listed}, "
            f"not {ENVELOPE}",
        )
    if profile.architecture not in MODULES:
        yield Problem(
            "adoption",
            f"no table of modules for {profile.architecture}; there is one for {', '.join(MODULES)}",
        )


def _plan_modules(model: Any, twin: _Twin) -> Iterable[tuple[nn.Module, Callable[..., Any], Any]]:
    """Every module that changes, with its new forward and plan. Raises StartRefused, naming each unknown module."""
    table = {_class(name): entry for name, entry in MODULES[type(model).__name__].items()}
    planned, unknown, wrong = [], [], []
    for path, module in model.named_modules():
        entry = table.get(type(module))
        if entry is None or "forward" in module.__dict__:
            already = " (its forward is replaced already)" if entry is not None else ""
            unknown.append(f"{path or 'the model'}: {type(module).__module__}.{type(module).__qualname__}{already}")
        elif entry.forward is not None:
            try:
                plan = entry.plan and entry.plan(module, twin.at(path), twin)
            except (AttributeError, ValueError) as error:
                wrong.append(f"{path}: {error}")
            else:
                planned.append((module, entry.forward, plan))
    if unknown or wrong:
        problems = [
            Problem(
                "adoption",
                f"{len(unknown)} modules of this {type(model).__name__} are not in the table of what can be adopted",
                tuple(unknown[:20]),
                "adopt a stock model; merge adapters into it first",
            )
        ]
        raise StartRefused([*(problems if unknown else []), *(Problem("adoption", line) for line in wrong)])
    return planned


def _class(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute, None)


def _names_by_operator(specs: Iterable[KernelSpec]) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for spec in specs:
        found.setdefault(spec.operator, set()).add(spec.name)
    return {operator: tuple(sorted(names)) for operator, names in sorted(found.items())}


def _counts(changed: Iterable[nn.Module]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for module in changed:
        found[type(module).__name__] = found.get(type(module).__name__, 0) + 1
    return found
