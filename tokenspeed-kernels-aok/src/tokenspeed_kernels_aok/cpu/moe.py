"""Mixtures of experts: `moe.route` and `moe.experts` (rules 9 and 10 of the bit order)."""

from __future__ import annotations

import struct

import torch

from tokenspeed_kernels_aok.cpu.arguments import DTYPE_CODES, float_code, unit_stride, vector_address
from tokenspeed_kernels_aok.cpu.gemm import PackedWeight, prepare_batched
from tokenspeed_kernels_aok.cpu.library import KernelCall
from tokenspeed_kernels_aok.cpu.selfcheck import checked, pattern

_ROUTE = struct.Struct("13qd2q")
_EXPERTS = struct.Struct("17q")

SCORINGS = ("softmax", "sigmoid")
FORMS = ("fused", "torch")
ORDERS = ("slot", "rank")


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    form: str,
    normalise: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32[T,k], ids int32[T,k]) of logits [T,E] in bf16 or fp32.

    Raises TypeError for another dtype, ValueError for unknown words and for groups that cannot give k experts.
    """
    tokens, experts = logits.shape
    code = float_code("logits", logits)
    _one_of("scoring", scoring, SCORINGS)
    _one_of("form", form, FORMS)
    size = experts // groups
    if experts % groups or (groups > 1 and size < 2) or not 0 < top_groups <= groups:
        raise ValueError(f"{experts} experts in {groups} groups, the best {top_groups} of them kept")
    if not 0 < top_k <= size * top_groups:
        raise ValueError(f"top_k is {top_k}, and {size * top_groups} of {experts} experts are eligible")
    bias_address = 0 if bias is None else vector_address("bias", bias, experts, torch.float32)
    logits = unit_stride(logits)
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    ids = logits.new_empty(tokens, top_k, dtype=torch.int32)
    short = form == "fused" and scoring == "softmax" and bias is None and groups == 1
    if tokens:
        _route(
            _ROUTE.pack(
                logits.data_ptr(), bias_address, weights.data_ptr(), ids.data_ptr(), tokens, experts, top_k,
                logits.stride(0), groups, top_groups, scoring == "sigmoid", short, normalise, scale, code,
                torch.get_num_threads(),
            )
        )  # fmt: skip
    return weights, ids


def experts(
    x: torch.Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    weights: torch.Tensor,
    ids: torch.Tensor,
    order: str,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' gated MLPs, always folded in slot order: x [T,H] -> [T,H].

    `weights` fp32[T,k] and `ids` int32[T,k] are read as contiguous; an id from E on is the identity. Raises TypeError
    for other dtypes, ValueError for shapes that do not fit.
    """
    tokens, hidden = x.shape
    code = float_code("x", x)
    _one_of("order", order, ORDERS)
    intermediate = down.k
    if (gate_up.groups, gate_up.n, gate_up.k) != (down.groups, 2 * intermediate, hidden) or down.n != hidden:
        raise ValueError(
            f"x has {hidden} columns, gate_up is [{gate_up.groups},{gate_up.n},{gate_up.k}], "
            f"down [{down.groups},{down.n},{down.k}]"
        )
    if gate_up.dtype != down.dtype:
        raise TypeError(f"gate_up: {gate_up.dtype}, down: {down.dtype}; they must have one dtype")
    if weights.dtype != torch.float32 or ids.dtype != torch.int32:
        raise TypeError(f"weights: {weights.dtype}, ids: {ids.dtype}; expected float32 and int32")
    if weights.shape != ids.shape or len(ids) != tokens:
        raise ValueError(f"weights {list(weights.shape)} and ids {list(ids.shape)}, expected [{tokens},k] both")
    x, weights, ids = unit_stride(x), weights.contiguous(), ids.contiguous()
    out = x.new_empty(tokens, hidden)
    if tokens:
        if int(ids.min()) < 0:
            raise ValueError("an expert's id is negative")
        _experts(
            _EXPERTS.pack(
                x.data_ptr(), gate_up.address, down.address, weights.data_ptr(), ids.data_ptr(), out.data_ptr(),
                tokens, ids.shape[1], gate_up.groups, hidden, intermediate, x.stride(0),
                gate_up.group_bytes, down.group_bytes, code, gate_up.code, torch.get_num_threads(),
            )
        )  # fmt: skip
    return out


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} {value!r} is not one of {', '.join(allowed)}")


def _check_route(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs: list[torch.Tensor] = []
    for dtype in DTYPE_CODES:
        logits = pattern(9, 40, dtype=dtype)
        bias = pattern(40, dtype=torch.float32, salt=3)
        for sigmoid, fused, with_bias, groups in ((0, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (1, 0, 1, 4)):
            weights, ids = torch.zeros(9, 5), torch.zeros(9, 5, dtype=torch.int32)
            call(
                _ROUTE.pack(
                    logits.data_ptr(), bias.data_ptr() if with_bias else 0, weights.data_ptr(), ids.data_ptr(),
                    9, 40, 5, 40, groups, (groups + 1) // 2, sigmoid, fused, 1, 1.5, DTYPE_CODES[dtype], 1,
                )
            )  # fmt: skip
            outputs += [weights, ids]
    return tuple(outputs)


def _check_experts(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    hidden, intermediate, count = 70, 38, 3
    ids = torch.tensor([[0, 2], [2, 3], [2, 0], [2, 0], [3, 2]], dtype=torch.int32)
    for dtype, code in DTYPE_CODES.items():
        gate_up = prepare_batched(pattern(count, 2 * intermediate, hidden, dtype=dtype))
        down = prepare_batched(pattern(count, hidden, intermediate, dtype=dtype, salt=5))
        x, weights = pattern(5, hidden, dtype=dtype, salt=9), pattern(5, 2, dtype=torch.float32, salt=13)
        out = torch.zeros(5, hidden, dtype=dtype)
        call(
            _EXPERTS.pack(
                x.data_ptr(), gate_up.address, down.address, weights.data_ptr(), ids.data_ptr(), out.data_ptr(),
                5, 2, count, hidden, intermediate, hidden, gate_up.group_bytes, down.group_bytes, code, code, 1,
            )
        )  # fmt: skip
        outputs.append(out)
    return tuple(outputs)


_route = checked("route", _ROUTE, _check_route)
_experts = checked("experts", _EXPERTS, _check_experts)
