"""Probes: arguments with a known answer. They show in which precision a kernel adds, and in which order.

Every partial sum of an accumulation probe is an integer that fp32 holds exactly, so any order in fp32 gives the exact
answer, and bf16, fp16 or tf32 does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.testing.subject import Subject

_EXACT = 0.0
_MANY = 2048


@dataclass(frozen=True)
class Probe:
    """Arguments by role, the answer, and the relative error that it may have."""

    name: str
    operator: str
    arguments: Mapping[str, Any]
    expected: tuple[torch.Tensor, ...]
    measure: float = _EXACT

    def survives(self, subject: Subject) -> bool:
        """Whether a kernel's weight format can hold the weights of the probe."""
        if subject.quantise is None:
            return True
        weights = (self.arguments[role].to(torch.float32) for role in OPERATORS[self.operator].weights)
        return all(torch.allclose(subject.quantise(weight)[1], weight, rtol=1e-6, atol=0.0) for weight in weights)

    def placed(self, subject: Subject) -> dict[str, Any]:
        """The arguments on the kernel's device, weights packed."""
        found = {}
        for role, value in self.arguments.items():
            moved = value.to(subject.device) if isinstance(value, torch.Tensor) else value
            found[role] = subject.pack(moved) if role in OPERATORS[self.operator].weights else moved
        return found


def probes(operator: str, dtypes: Mapping[str, str]) -> Iterator[Probe]:
    """The accumulation probes of an operator for one signature; none where it adds nothing up."""
    types = {role: getattr(torch, name) for role, name in dtypes.items()}
    if operator in ("gemm.linear", "gemm.batched"):
        yield from _projections(operator, types["x"], types["weight"])
    elif operator in ("norm.rms", "norm.add_rms"):
        yield from _norms(operator, types["x"], types["weight"])
    elif operator == "sampling.block_sumexp":
        logits = torch.full((2, _MANY), 3.0, dtype=types["logits"])
        arguments = {"logits": logits, "row_max": torch.full((2,), 3.0), "temperature": torch.ones(2), "block": _MANY}
        yield Probe("the sum of 2048 ones", operator, arguments, (torch.full((2, 1), float(_MANY)),))
    elif operator == "sampling.logprobs":
        logits = torch.full((2, _MANY), 300.0, dtype=types["logits"])
        expected = torch.full((2, 1), -torch.log(torch.tensor(float(_MANY))).item())
        for order in ("torch", "megatron"):
            arguments = {
                "logits": logits,
                "ids": torch.zeros(2, 1, dtype=torch.int64),
                "temperature": torch.ones(2),
                "order": order,
                "block": 32768,
            }
            yield Probe(f"2048 equal logits in {order} order", operator, arguments, (expected,), 1e-6)


def _projections(operator: str, x_type: torch.dtype, weight_type: torch.dtype) -> Iterator[Probe]:
    def probe(name: str, x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor) -> Probe:
        x, weight, expected = x.to(x_type), weight.to(weight_type), expected.to(x_type)
        if operator == "gemm.linear":
            return Probe(name, operator, {"x": x, "weight": weight, "bias": None}, (expected,))
        return Probe(name, operator, {"x": x[:, None], "weight": weight[None]}, (expected[:, None],))

    ones = torch.ones(3, _MANY)
    yield probe("the sum of 2048 ones", ones, torch.ones(2, _MANY), torch.full((3, 2), float(_MANY)))
    up_and_down = torch.full((2, 96), 64.0)
    signs = torch.cat((torch.full((48,), 64.0), torch.full((48,), -64.0)))
    yield probe("196608 and back to 1", torch.cat((up_and_down, torch.ones(2, 1)), -1),
                torch.cat((signs, torch.ones(1)))[None].repeat(3, 1), torch.ones(2, 3))  # fmt: skip
    if x_type is torch.float32 and weight_type is torch.float32:
        fine = torch.full((1, 16), 1.0 + 2.0**-12)
        yield probe("1 + 2^-12 keeps its last bit", fine * torch.eye(1, 16), torch.ones(2, 16), fine[:, :2])


def _norms(operator: str, x_type: torch.dtype, weight_type: torch.dtype) -> Iterator[Probe]:
    measure = dict(OPERATORS[operator].agreement)[str(x_type).removeprefix("torch.")]
    for name, value in (("the mean square of 2048 ones", 1.0), ("a mean square of 90000", 300.0)):
        x = torch.full((2, _MANY), value, dtype=x_type)
        weight = torch.ones(_MANY, dtype=weight_type)
        out = torch.ones(2, _MANY, dtype=x_type)
        if operator == "norm.rms":
            yield Probe(name, operator, {"x": x, "weight": weight, "eps": 1e-6}, (out,), measure)
        else:
            arguments = {"x": x, "residual": torch.zeros_like(x), "weight": weight, "eps": 1e-6}
            yield Probe(name, operator, arguments, (out, x), measure)


def order_probes(operator: str, trait: str, value: str, dtypes: Mapping[str, str]) -> Iterator[Probe]:
    """Probes whose answer is exact only in the order that a trait declares; none for a trait without a definition here.

    `block_order=torch_sum` is torch's own sum of torch's own exponentials; `combine_order=slot` the fp32 fold of the
    slots from the first to the last.
    """
    if (operator, trait, value) == ("moe.experts", "combine_order", "slot"):
        yield from _slot_folds(getattr(torch, dtypes["x"]), getattr(torch, dtypes["weight"]))
    if (operator, trait, value) != ("sampling.block_sumexp", "block_order", "torch_sum"):
        return
    from tokenspeed.kernels.reference.sampling import block_sumexp

    logits = torch.randn(3, 331, generator=torch.Generator().manual_seed(5)).to(getattr(torch, dtypes["logits"]))
    arguments = {"logits": logits, "row_max": logits.float().amax(-1), "temperature": torch.ones(3), "block": 128}
    yield Probe("sums of three rows", operator, arguments, (block_sumexp(**arguments),))  # type: ignore[arg-type]


def _slot_folds(x_type: torch.dtype, weight_type: torch.dtype) -> Iterator[Probe]:
    """Weights 1, 2^-24, 2^-24, -1 of outputs that are all 1: their fold in slot order is 0, in any other it is not."""
    experts, hidden, inner = 4, 8, 2
    gate_up = torch.zeros(experts, 2 * inner, hidden)
    # silu(64) is 64 in fp32, so the expert's inner value is 64 * 1/64 = 1, exactly.
    gate_up[:, 0, 0], gate_up[:, inner, 0] = 64.0, 1.0 / 64
    down = torch.zeros(experts, hidden, inner)
    down[:, :, 0] = 1.0
    tiny = 2.0**-24
    weights = torch.tensor([[1.0, tiny, tiny, -1.0]]).repeat(2, 1)
    for name, first in (("experts", 0), ("the identity", experts)):
        x = torch.zeros(2, hidden)
        x[:, 0] = 1.0
        arguments = {
            "x": x.to(x_type),
            "gate_up": gate_up.to(weight_type),
            "down": down.to(weight_type),
            "weights": weights,
            "ids": torch.tensor([[2, 0, 3, 1], [3, 2, 1, 0]], dtype=torch.int32) + first,
            "order": "slot",
        }
        yield Probe(f"1 + 2^-24 + 2^-24 - 1 of {name}", "moe.experts", arguments, (torch.zeros(2, hidden).to(x_type),))
