"""The engine's log-probabilities for a trainer's logits."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from tokenspeed.errors import StartRefused
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import Pins, select
from tokenspeed.layers.context import LayerContext
from tokenspeed.machine import read_machine
from tokenspeed.numerics.envelopes import TrainerRequest
from tokenspeed.numerics.resolve import ResolvedNumerics, resolve
from tokenspeed.plugins import load_plugins
from tokenspeed.trainer import kernels, operators

TRAINERS = {"torch": "transformers", "megatron": "megatron"}
"""The trainer profile whose order of additions each `order` is."""

LOGPROBS = "sampling.logprobs"


def logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    order: str = "torch",
    temperature: float | torch.Tensor = 1.0,
    vocab_shards: int | None = None,
    plugins: tuple[str, ...] | None = None,
    kernel: Mapping[str, str] | None = None,
) -> torch.Tensor:
    """Log-probabilities of `ids` (int64[...]) in `logits` [...,V], after temperature, over the vocabulary: fp32[...].

    The numbers that an engine under `rl-bitwise` reports for the same logits, with a gradient. `order` is the engine's
    `--logprob-order` (`torch` for `--trainer transformers`, `megatron`), `vocab_shards` that of
    `--trainer megatron,vocab-shards=N`. `temperature` is the engine's too: 0 counts as 1, and a tensor [...] gives one
    for each row, without a gradient. A negative id gives NaN and no gradient. `plugins` and `kernel` are the engine's
    options of these names, as in `adopt`. Raises ValueError or TypeError for arguments that mean nothing, StartRefused
    where no kernel with the promised features is installed.
    """
    trainer = _trainer(order, vocab_shards)
    _check_shapes(logits, ids)
    divisor = _divisor(temperature, logits, ids)
    plugins, pins = kernels.read_options(plugins, kernel)
    numerics, name = _choose(trainer, logits.dtype, str(logits.device), plugins, tuple(sorted(pins.items())))
    vocab = logits.shape[-1]
    out: torch.Tensor = operators.logprobs(
        logits.reshape(-1, vocab),
        ids.reshape(-1, 1),
        divisor.reshape(-1).contiguous(),
        order,
        numerics.logprob_block(vocab),
        name,
    )
    return out.view(ids.shape)


def _check_shapes(logits: torch.Tensor, ids: torch.Tensor) -> None:
    if ids.dtype != torch.int64:
        raise TypeError(f"ids is {ids.dtype}, expected int64")
    if not logits.ndim or not logits.shape[-1] or logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"logits is {list(logits.shape)} and ids {list(ids.shape)}: give logits [...,V] and ids [...], one for "
            "each row"
        )
    if ids.device != logits.device:
        raise ValueError(f"logits is on {logits.device} and ids on {ids.device}")


def _divisor(temperature: float | torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """fp32, of the shape of `ids`; the values are checked by the operator."""
    if not isinstance(temperature, torch.Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise TypeError(f"temperature is {temperature!r}, expected a number or a tensor")
        return torch.full(ids.shape, temperature, dtype=torch.float32, device=logits.device)
    if temperature.requires_grad:
        raise ValueError("temperature asks for a gradient, and logprobs has one for logits only; detach it")
    try:
        return temperature.to(logits.device, torch.float32).expand(ids.shape)
    except RuntimeError:
        shapes = f"temperature is {list(temperature.shape)} and ids {list(ids.shape)}"
        raise ValueError(f"{shapes}: give one temperature for each row, or one for all") from None


def order_of(trainer: str) -> tuple[str, int | None]:
    """The `order` and `vocab_shards` that `--trainer TRAINER` means. Raises ValueError for another one."""
    request = TrainerRequest.parse(trainer)
    order = next((order for order, name in TRAINERS.items() if name == request.name), None)
    shards = request.options.get("vocab-shards")
    if order is None or request.options.keys() - {"vocab-shards"} or (shards and not shards.isdecimal()):
        raise ValueError(
            f"trainer {trainer!r} is not one of {', '.join(sorted(TRAINERS.values()))}, or megatron,vocab-shards=N"
        )
    return order, int(shards) if shards else None


def _trainer(order: str, vocab_shards: int | None) -> str:
    if order not in TRAINERS:
        raise ValueError(f"logprob order {order!r} is not one of {', '.join(TRAINERS)}")
    if vocab_shards is None:
        return TRAINERS[order]
    if order != "megatron":
        raise ValueError(f"vocab_shards={vocab_shards} was given, but order {order!r} sums whole rows")
    return f"megatron,vocab-shards={vocab_shards}"


@functools.cache
def _choose(
    trainer: str, dtype: torch.dtype, device: str, plugins: tuple[str, ...] | None, pins: tuple[tuple[str, str], ...]
) -> tuple[ResolvedNumerics, str]:
    """The numerics of `trainer`, and the name of the loaded kernel that computes its log-probabilities."""
    host = load_plugins(plugins)
    registry = KernelRegistry.from_plugins(host)
    machine = read_machine(device)
    resolution = resolve(
        "rl-bitwise", trainer, profiles=host.trainer_profiles(), kernels=registry, device=machine.device
    )
    numerics = resolution.numerics
    ctx = LayerContext(dtype, numerics.switches, numerics.features, numerics.traits)
    need = ctx.operator(LOGPROBS, dtypes={"logits": dtype}).need
    selection = select([need], registry, machine, Pins(dict(pins)))
    if problems := (*resolution.problems, *selection.problems):
        raise StartRefused(problems)
    spec = selection.choices[need]
    kernels.load([spec])
    return numerics, spec.name
