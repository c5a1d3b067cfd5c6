"""Reading `config.json`: typed fields with every fault collected, and the part that all dense decoders share.

A field that changes what a model computes is either honoured or refused with a reason; none is dropped in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.errors import CheckpointError
from tokenspeed.layers.rope import RopeScaling
from tokenspeed.models.rope_config import read_rope

_MISSING = object()

MAX_SIZE = 2**31 - 1
"""Largest size of anything: what an index of a GPU's kernels can reach."""

MAX_LAYERS = 10_000
"""Far more than any model has, and few enough to be built when a number is wrong."""


class ConfigFields:
    """Typed access to a mapping. Faults are collected; `check` raises them together as one CheckpointError.

    A getter that finds a fault records it and returns the default (or a harmless stand-in), so that reading goes on.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self.config = config
        self.where = where
        self.faults: list[str] = []

    def check(self) -> None:
        """Raise CheckpointError with every fault found so far."""
        if self.faults:
            raise CheckpointError("\n".join(f"{self.where}: {fault}" for fault in self.faults))

    def refuse(self, name: str, reason: str) -> None:
        """Record that the value of `name` cannot be honoured."""
        self.faults.append(f"{name}={self.config.get(name)!r} is not supported: {reason}")

    def positive_int(self, name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """An integer of at least 1; required unless there is a default."""
        value = self._get(name, _MISSING if default is None else default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
            return value
        too_large = isinstance(value, int) and value > most
        return int(self._fault(name, value, f"at most {most}" if too_large else "a positive integer", 1))

    def whole(self, name: str, default: int, *, most: int = MAX_SIZE) -> int:
        """An integer of at least 0."""
        value = self._get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
            return value
        return int(self._fault(name, value, f"an integer from 0 to {most}", default))

    def positive_number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; required unless there is a default."""
        value = self._get(name, _MISSING if default is None else default)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
            return value
        return float(self._fault(name, value, "a positive number", 1.0))

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(name, default)
        return value if isinstance(value, bool) else bool(self._fault(name, value, "true or false", default))

    def only(self, name: str, allowed: Sequence[Any], reason: str) -> None:
        """Refuse `name` unless it is absent or among the allowed values."""
        if self.config.get(name) is not None and self.config[name] not in allowed:
            self.refuse(name, f"{reason} (supported: {', '.join(map(repr, allowed))})")

    def by_layer(self, name: str, given: object, num_layers: int, kinds: Sequence[str]) -> list[str]:
        """`given` is a list with one of `kinds` for each layer; the first kind for all where it is not."""
        if isinstance(given, list | tuple) and len(given) == num_layers and all(kind in kinds for kind in given):
            return list(given)
        self.refuse(name, f"expected {num_layers} entries, each {' or '.join(kinds)}")
        return [kinds[0]] * num_layers

    def _get(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def _fault(self, name: str, value: Any, expected: str, stand_in: Any) -> Any:
        self.faults.append(f"{name} is missing" if value is _MISSING else f"{name}={value!r} is not {expected}")
        return stand_in


@dataclass(frozen=True)
class DenseConfig:
    """Shape of a dense decoder of the Llama family; `max_positions` is its longest context in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied: bool
    max_positions: int
    rope: RopeScaling


def read_dense(fields: ConfigFields, *, head_dim: int | None = None, max_positions: int = 32768) -> DenseConfig:
    """The common part. `head_dim` and `max_positions` are the architecture's defaults; None means hidden / heads.

    Faults are left in `fields`; the caller reads its own fields and then calls `fields.check()`.
    """
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.faults.append(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    if head_dim is None and fields.config.get("head_dim") is None and hidden_size % num_heads:
        fields.faults.append(
            f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}, and there is no head_dim"
        )
    fields.only("hidden_act", ("silu",), "the gated MLP computes silu(gate) * up")
    if quantisation := fields.config.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, Mapping) else quantisation
        fields.faults.append(f"the checkpoint is quantised ({method}), and no installed model reads that format")
    positions = fields.positive_int("max_position_embeddings", max_positions)
    heads = fields.positive_int("head_dim", head_dim or max(hidden_size // num_heads, 1))
    if heads % 2:
        fields.faults.append(f"head_dim={heads} is odd; rotary embeddings turn pairs of features")
    rope = read_rope(fields, positions)
    if rope.kind == "yarn":
        # Qwen states the context before scaling in max_position_embeddings, DeepSeek the one after it.
        positions = max(positions, int(min(rope.original_positions * rope.factor, MAX_SIZE)))
    return DenseConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=fields.positive_int("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=heads,
        rms_norm_eps=fields.positive_number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", False),
        max_positions=positions,
        rope=rope,
    )


def read_windows(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Each layer's attention window (0: all keys), as Qwen states it: by layer, or from `max_window_layers` upwards."""
    kinds: Any = fields.config.get("layer_types")
    used = fields.flag("use_sliding_window", False)
    window = fields.positive_int("sliding_window", 4096) if used else 0
    if kinds is None:
        first = fields.whole("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    kinds = fields.by_layer("layer_types", kinds, num_layers, ("full_attention", "sliding_attention"))
    if not used and "sliding_attention" in kinds:
        fields.refuse("layer_types", "use_sliding_window is off, so every layer must be full_attention")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
