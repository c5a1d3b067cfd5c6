"""`adopt` and `restore`: exchange the forwards of a Hugging Face model's modules, instance by instance.

Which kernel goes where comes from the engine: its own model is built from the same configuration on the meta device,
asks for its operators, and the ordinary selection answers under `rl-bitwise`. Its layers also give the rotary tables,
scales and windows, so nothing is stated twice. Every module of the trainer's model must be in the table of `table`; one
that is not (an adapter, a subclass, a quantised layer) is refused by name, since its arithmetic is unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tokenspeed.errors import CheckpointError, PluginError, Problem, StartRefused
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import Pins, select
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.layers.context import LayerContext, dtype_name
from tokenspeed.loading.update import fitting
from tokenspeed.machine import DEVICES, read_machine
from tokenspeed.models.profile import ModelProfile
from tokenspeed.models.registry import ModelRegistry, model_class
from tokenspeed.numerics.resolve import resolve
from tokenspeed.plugins import load_plugins
from tokenspeed.trainer import kernels, modules
from tokenspeed.trainer.table import MODULES, Entry, Twin

ENVELOPE = "rl-bitwise"
ATTENTION = "tokenspeed"
"""Name of the attention implementation that an adopted model is set to."""

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


def adopt(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    plugins: tuple[str, ...] | None = None,
    kernel: Mapping[str, str] | None = None,
) -> Adoption:
    """Make `model`, a `transformers` causal language model, compute the logits of an engine under `rl-bitwise`.

    In place; parameters stay where they are and gradients flow as before. Any batch shape is read: one sequence in a
    row, padded left or right, or packed with `position_ids` that start again. All parameters must have one dtype, the
    engine's, except that routers may be kept in fp32. Where something else converts them for every forward pass (the
    mixed precision of `fully_shard`), `dtype` is what they are converted to and what the engine has. `plugins` and
    `kernel` are the engine's options of these names.

    Raises StartRefused with every reason: an architecture, module or setting that is not in the table, or an operator
    that no installed kernel offers with the required features. The model is then as it was.
    """
    import transformers

    if hasattr(model, _ADOPTION):
        raise ValueError("this model is adopted already; `restore` it first")
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(
            f"{type(model).__name__} is no transformers model; adopt the one inside it, after merging adapters into it"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, expected one of torch's, as torch.bfloat16")
    twin = _plan_twin(model, dtype, *kernels.read_options(plugins, kernel))
    planned = list(_plan_modules(model, twin))
    _check_weights(model, twin)
    kernels.load(twin.choices.values())

    # Registering a name changes nothing for models that do not ask for it.
    transformers.AttentionInterface.register(ATTENTION, modules.no_attention)
    transformers.AttentionMaskInterface.register(ATTENTION, modules.no_mask)
    adoption = Adoption(
        type(model).__name__,
        dtype_name(twin.dtype),
        _names_by_operator(twin.choices.values()),
        _counts(module for module, forward, _ in planned if forward is not None),
        model.config._attn_implementation,
    )
    model.set_attn_implementation(ATTENTION)
    for module, forward, plan in planned:
        if forward is not None:
            # Unlike a bound method it can be copied and pickled with its module.
            module.forward = partial(forward, module)
        setattr(module, modules.PLAN, plan)
    setattr(model, _ADOPTION, adoption)
    return adoption


def restore(model: nn.Module) -> None:
    """Undo `adopt`: every module has its class's own forward again. The model may have been wrapped since.

    Raises ValueError when the model is not adopted.
    """
    adopted: Any = next((module for module in model.modules() if _ADOPTION in vars(module)), None)
    if adopted is None:
        raise ValueError("this model is not adopted")
    adoption: Adoption = getattr(adopted, _ADOPTION)
    exchanged = {entry.forward for entry in MODULES[adoption.architecture].values() if entry.forward is not None}
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "func", None) in exchanged:
            del module.forward
        module.__dict__.pop(modules.PLAN, None)
    delattr(adopted, _ADOPTION)
    adopted.set_attn_implementation(adoption.attention)


def _plan_twin(model: Any, dtype: torch.dtype | None, plugins: tuple[str, ...] | None, pins: Mapping[str, str]) -> Twin:
    """The engine's model of the same configuration and its kernels. Raises StartRefused."""
    host = load_plugins(plugins)
    registry = KernelRegistry.from_plugins(host)
    table = _entries(type(model).__name__)
    own, device = _one(model, "dtype", table), _one(model, "device", {})
    if device.type not in DEVICES:
        summary = f"the parameters are on the device {device}, an engine's are on one of {', '.join(DEVICES)}"
        raise StartRefused([Problem("adoption", summary, remedy="load the weights and move the model there first")])
    dtype = dtype or own
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
        dict.fromkeys(operation.need for operation in wanted), registry, read_machine(str(device)), Pins(pins)
    )
    if problems := [*problems, *selection.problems]:
        raise StartRefused(problems)
    return Twin(built, selection.choices, dtype, model, table)


def _one(model: nn.Module, what: str, table: Mapping[type, Entry]) -> Any:
    """The dtype or device of all parameters but those that may be fp32. Raises StartRefused when there are several."""
    found = {getattr(parameter, what): name for name, parameter in _parameters(model, table)}
    if len(found) != 1:
        examples = tuple(f"{value}: {name}" for value, name in found.items())
        summary = f"the parameters have {len(found)} {what}s, an engine has one"
        raise StartRefused([Problem("adoption", summary, examples, f"convert the model to one {what} first")])
    return next(iter(found))


def _parameters(model: nn.Module, table: Mapping[type, Entry]) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in model.named_modules():
        owner = model.get_submodule(path.removesuffix(".classifier"))
        keeps_fp32 = type(owner) in table and table[type(owner)].keeps_fp32
        for name, parameter in module.named_parameters(recurse=False):
            if not (keeps_fp32 and parameter.dtype == torch.float32):
                yield f"{path}.{name}", parameter


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


def _plan_modules(model: Any, twin: Twin) -> Iterable[tuple[nn.Module, Callable[..., Any] | None, Any]]:
    """Every module that may change, with its new forward, if any, and plan.

    Raises StartRefused, naming each unknown module.
    """
    table = twin.table
    planned, unknown, wrong = [], [], []
    for path, module in model.named_modules():
        entry = table.get(type(module))
        if entry is None or "forward" in module.__dict__:
            unknown.append((path, module))
            continue
        try:
            plan = entry.plan and entry.plan(module, twin.at(path), twin)
        except (AttributeError, ValueError) as error:
            wrong.append(f"{path}: {error}")
        else:
            if entry.forward is not None:
                changes = plan is not None or entry.plan is None
                planned.append((module, entry.forward if changes else None, plan))
    if unknown or wrong:
        problems = [
            Problem(
                "adoption",
                f"modules of this {type(model).__name__} are not in the table of what can be adopted",
                tuple(modules.named(unknown)),
                "adopt a stock model; merge adapters into it first",
            )
        ]
        raise StartRefused([*(problems if unknown else []), *(Problem("adoption", line) for line in wrong)])
    return planned


def _check_weights(model: nn.Module, twin: Twin) -> None:
    """Raise StartRefused where an engine of this configuration could not take the model's weights."""
    shapes = ((name, tensor.to("meta")) for name, tensor in model.state_dict().items())
    try:
        for _ in fitting(twin.model, shapes, "the model's weights are not those that its configuration describes"):
            pass
    except CheckpointError as error:
        raise StartRefused([Problem("adoption", str(error))]) from error


def _entries(architecture: str) -> dict[type, Entry]:
    """The table of an architecture by class; empty where there is none."""
    return {_class(name): entry for name, entry in MODULES.get(architecture, {}).items()}


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
