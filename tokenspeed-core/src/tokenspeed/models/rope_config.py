"""Reading the rotary embedding out of a configuration, in transformers 5's form or the older one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenspeed.layers.rope import RopeScaling

if TYPE_CHECKING:
    from tokenspeed.models.config import ConfigFields

SUPPORTED = ("default", "linear", "llama3", "yarn")
_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_SCALED = {"factor", "original_max_position_embeddings", "finetuned"}
_KEYS_OF = {
    "default": _KEYS,
    "linear": _KEYS | _SCALED,
    "llama3": _KEYS | _SCALED | {"low_freq_factor", "high_freq_factor"},
    "yarn": _KEYS | _SCALED | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}
_REASON_OF = {
    "dynamic": "its frequencies change with the length of the sequence, so cached keys would not be a function of the "
    "position alone; use yarn or linear",
    "longrope": "its frequencies change with the length of the sequence; use yarn or linear",
}


def read_rope(fields: ConfigFields, max_positions: int) -> RopeScaling:
    """`rope_scaling` + `rope_theta` (older files) or `rope_parameters` (transformers 5); faults go to `fields`."""
    name = "rope_scaling" if fields.config.get("rope_scaling") else "rope_parameters"
    given: Any = fields.config.get(name) or {}
    if not isinstance(given, Mapping):
        fields.faults.append(f"{name}={given!r} is not an object")
        given = {}
    if any(isinstance(value, Mapping) for value in given.values()):
        fields.refuse(name, "separate parameters for each layer type; one set for all layers is supported")
        return RopeScaling()
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in SUPPORTED:
        reason = _REASON_OF.get(kind, f"supported types are {', '.join(SUPPORTED)}")
        fields.faults.append(f"{name} of type {kind!r} is not supported: {reason}")
        return RopeScaling()
    if unknown := sorted(given.keys() - _KEYS_OF[kind]):
        fields.faults.append(f"{name} of type {kind!r} has unknown keys {', '.join(unknown)}")
    if (given.get("partial_rotary_factor") or fields.config.get("partial_rotary_factor") or 1) != 1:
        fields.faults.append(f"{name}: a partial_rotary_factor other than 1 is not supported by this architecture")
    inside = type(fields)(
        {
            "rope_theta": fields.config.get("rope_theta"),
            **{key: value for key, value in given.items() if value is not None},
        }
    )
    scaling = _scaling(inside, kind, fields.config.get("original_max_position_embeddings") or max_positions)
    fields.faults += [f"{name}: {fault}" for fault in inside.faults]
    return scaling


def _scaling(given: ConfigFields, kind: str, default_original: int) -> RopeScaling:
    theta = given.positive_number("rope_theta", 10000.0)
    if kind == "default":
        return RopeScaling(theta=theta)
    factor = given.positive_number("factor")
    if kind == "linear":
        return RopeScaling(kind, theta, factor)
    original = given.positive_int("original_max_position_embeddings", default_original)
    if kind == "llama3":
        low, high = given.positive_number("low_freq_factor"), given.positive_number("high_freq_factor")
        if low >= high:
            given.faults.append(f"low_freq_factor={low} is not below high_freq_factor={high}")
        return RopeScaling(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeScaling(
        kind,
        theta,
        factor,
        original,
        attention_factor=_yarn_attention_factor(given, factor),
        beta_fast=given.positive_number("beta_fast", 32.0),
        beta_slow=given.positive_number("beta_slow", 1.0),
        truncate=given.flag("truncate", True),
    )


def _yarn_attention_factor(given: ConfigFields, factor: float) -> float:
    """What multiplies cosines and sines: as given, or 0.1 ln(factor) + 1 (DeepSeek: a quotient of two such terms)."""
    if given.config.get("attention_factor") is not None:
        return given.positive_number("attention_factor")
    if given.config.get("mscale") and given.config.get("mscale_all_dim"):
        numerator = _magnitude(factor, given.positive_number("mscale"))
        return numerator / _magnitude(factor, given.positive_number("mscale_all_dim"))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
