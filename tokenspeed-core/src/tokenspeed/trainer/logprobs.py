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
    `--trainer megatron,vocab-shards=N`. `temperature` 0 counts as 1; a tensor [...] gives one for each row. A negative
    id gives NaN and no gradient. `plugins` and `kernel` are the engine's options of these names, as in `adopt`. Raises
    ValueError for another order, StartRefused where no kernel with the promised features is installed.
    """
    trainer = _trainer(order, vocab_shards)
    pins = tuple(sorted((kernel or {}).items()))
    numerics, name = _choose(
        trainer, logits.dtype, logits.device.type, None if plugins is None else tuple(plugins), pins
    )
    vocab = logits.shape[-1]
    rows = logits.reshape(-1, vocab)
    divisor = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).expand(ids.shape)
    out: torch.Tensor = operators.logprobs(
        rows, ids.reshape(-1, 1), divisor.reshape(-1).contiguous(), order, numerics.logprob_block(vocab), name
    )
    return out.view(ids.shape)


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
    own = {operator: name for operator, name in pins if operator == LOGPROBS}
    need = ctx.operator(LOGPROBS, dtypes={"logits": dtype}).need
    selection = select([need], registry, machine, Pins(own))
    if problems := (*resolution.problems, *selection.problems):
        raise StartRefused(problems)
    spec = selection.choices[need]
    kernels.load([spec])
    return numerics, spec.name
