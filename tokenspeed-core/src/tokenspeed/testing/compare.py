"""How far a result is from the reference, in the operator's own measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tokenspeed.kernels.operators import Operator
from tokenspeed.kernels.reference.sampling import kept_ids
from tokenspeed.testing.cases import Results
from tokenspeed.testing.memory import same_bits

_FLOOR = {"sampling.logprobs": 1.0}
"""Smallest magnitude that an error is measured against: a log-probability near 0 is a difference of larger numbers."""

_CLOSE_CALL = 2e-5
"""A sampled id is right, too, when raising its logit by this part of the largest makes the reference choose it."""

_FILTERS = ("temperature", "top_k", "top_p", "min_p")


def tolerance(operator: Operator, dtype: torch.dtype) -> float:
    """The largest relative error of an output of this dtype; 0 for integers."""
    return dict(operator.agreement).get(str(dtype).removeprefix("torch."), 0.0)


def error(operator: Operator, out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to the largest magnitude in that row; infinite where the kind differs.

    NaN must meet NaN and an infinity the same one, at the same places. Integers differ by 0 or infinitely.
    """
    if out.shape != expected.shape or out.dtype != expected.dtype:
        return float("inf")
    if not out.dtype.is_floating_point:
        return 0.0 if torch.equal(out, expected) else float("inf")
    a, b = _vector(out.to(torch.float64)), _vector(expected.to(torch.float64))
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    if not a.numel():
        return 0.0
    scale = b.where(finite, 0.0).abs().amax(-1, keepdim=True).clamp_min(_FLOOR.get(operator.name, 0.0))
    difference = (a - b).where(finite, 0.0).abs()
    worst = (difference / scale.clamp_min(1e-300)).amax()
    return float(worst)


def _vector(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)


def differing(expected: Results, got: Results, units: Sequence[int]) -> list[int]:
    """Units whose bits differ."""
    return [
        unit
        for unit in units
        if len(expected[unit]) != len(got[unit])
        or not all(same_bits(a, b) for a, b in zip(expected[unit], got[unit], strict=True))
    ]


def first_difference(expected: Results, got: Results, units: Sequence[int]) -> tuple[int, str] | None:
    """The first unit whose bits differ, and where; None when all bits agree."""
    wrong = differing(expected, got, units)
    return (wrong[0], spell_difference(expected[wrong[0]], got[wrong[0]])) if wrong else None


def spell_difference(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> str:
    """Where the first two outputs that are not the same part, with both values."""
    for number, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {number} is {list(b.shape)} {b.dtype}, expected {list(a.shape)} {a.dtype}"
        if not same_bits(a, b):
            width = a.element_size()
            left, right = (_vector(x).contiguous().view(torch.uint8).reshape(-1, width) for x in (a, b))
            places = (left != right).any(-1).nonzero().flatten()
            at = int(places[0])
            old, new = _vector(a).reshape(-1)[at].item(), _vector(b).reshape(-1)[at].item()
            same = "" if old != new and old == old else " (the same number in other bits)" if old == new else ""
            count = f"{len(places)} of {a.numel()} differ"
            return f"element {at} of output {number} is {new!r}, expected {old!r}{same}; {count}"
    return f"{len(got)} outputs, expected {len(expected)}"


def may_be_drawn(arguments: Mapping[str, Any], row: int, chosen: int) -> bool:
    """Whether a sampler with a stream of its own may draw `chosen` for this row: it is kept, or ties with what is."""
    logits = arguments["logits"][row].to(torch.float32)
    temperature, top_k, top_p, min_p = (float(arguments[role][row]) for role in _FILTERS)
    if temperature == 0 or not 0 <= chosen < len(logits) or not logits.amax().isfinite():
        return False
    logits = logits.clone()
    logits[chosen] += _CLOSE_CALL * max(1.0, float(logits[logits.isfinite()].abs().amax()))
    z = logits / temperature
    return bool(z[chosen] >= z[kept_ids(z, int(top_k), top_p, min_p)].amin())


def is_close_call(reference: Any, arguments: Mapping[str, Any], row: int, chosen: int) -> bool:
    """Whether the reference of `sampling.sample` would choose `chosen` for this row if its logit were a little larger.

    Covers near ties of the noise and tokens at the edge of a filter, which exp and log of another library may move.
    """
    one = {
        role: value[row : row + 1].clone() if isinstance(value, torch.Tensor) else value
        for role, value in arguments.items()
    }
    logits = one["logits"].to(torch.float32)
    if not 0 <= chosen < logits.shape[-1] or float(one["temperature"][0]) == 0:
        return False
    # What top-k keeps is exact, ties included.
    z = logits[0] / one["temperature"][0]
    better = (z > z[chosen]) | ((z == z[chosen]) & (torch.arange(len(z), device=z.device) < chosen))
    if 0 < int(one["top_k"][0]) <= int(better.sum()):
        return False
    logits[0, chosen] += _CLOSE_CALL * max(1.0, float(logits.abs().amax()))
    return int(reference(*{**one, "logits": logits}.values())[0]) == chosen
