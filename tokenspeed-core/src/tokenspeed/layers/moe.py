"""Mixtures of experts: the router, the routed experts, and the block of both with shared experts beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.weights import Bundle, TensorTarget, WeightLayer


@dataclass(frozen=True)
class Routing:
    """How a router chooses (`kernels.reference.moe` says what each field means).

    `num_experts` are the router's outputs. `bias` gives the router an fp32 bias for the choice, `precise` computes the
    logits in fp32 (weights are then kept in fp32), else they are in the model's dtype.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: bool = False
    precise: bool = False


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls one expert's projections, the router's weight, and the block where this is not `mlp`."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "weight"
    block: str | None = None

    def rename(self, prefix: str) -> str:
        """The checkpoint's name of a layer `...mlp.gate` or `...mlp.experts`."""
        if self.block is None:
            return prefix
        parent, _, own = prefix.rpartition(".")
        return f"{parent.rpartition('.')[0]}.{self.block}.{own}"


class Router(WeightLayer):
    """x [T,H] -> (weights fp32[T,k], ids int32[T,k]).

    The switch `router_topk` decides how: `torch` is the published order, `fused` may take a shorter way.
    """

    def __init__(self, ctx: LayerContext, hidden_size: int, routing: Routing, names: ExpertNames | None = None) -> None:
        super().__init__()
        self.routing = routing
        self.names = names or ExpertNames()
        self.form = ctx.switches.get("router_topk", "fused")
        self.dtype = torch.float32 if routing.precise else ctx.dtype
        self.weight: nn.Parameter | None = self.new_weight((routing.num_experts, hidden_size), self.dtype)
        self.e_score_correction_bias = self.new_weight((routing.num_experts,), torch.float32) if routing.bias else None
        self.linear = ctx.operator(
            "gemm.linear",
            dtypes={"x": self.dtype, "weight": self.dtype},
            facts={"k": hidden_size, "n": routing.num_experts},
        )
        self.route = ctx.operator(
            "moe.route",
            dtypes={"logits": self.dtype},
            facts={"experts": routing.num_experts, "top_k": routing.top_k},
            traits={"form": self.form},
        )
        self.packed: Any = None

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, TensorTarget]]:
        prefix = self.names.rename(prefix)
        for name, target in super().checkpoint_tensors(prefix):
            yield (f"{prefix}.{self.names.router}" if target.parameter == "weight" else name), target

    def bundles(self, prefix: str) -> Iterator[tuple[str, Bundle]]:
        assert self.weight is not None
        stored, held = self.names.rename(prefix), f"{prefix}.{self.names.router}"
        if stored != prefix:
            yield held, Bundle((tuple(self.weight.shape),), {f"{stored}.{self.names.router}": ()})

    def pack(self) -> None:
        assert self.weight is not None
        self.packed = self.linear.prepare(self.weight.data)
        self.weight = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids of the chosen experts, best choice first."""
        routing = self.routing
        weights, ids = self.route(
            self.linear(x.to(self.dtype), self.packed, None),
            self.e_score_correction_bias,
            routing.top_k,
            routing.scoring,
            self.form,
            routing.normalise,
            routing.scale,
            routing.groups,
            routing.top_groups,
        )
        return weights, ids


class Experts(WeightLayer):
    """The routed experts' gated MLPs and their weighted sum. `num_identities` ids beyond them pass their input on.

    Checkpoints store them one by one (`3.gate_proj.weight`) or stacked (`gate_up_proj`, `down_proj`); both are read.
    The switch `moe_combine_order` decides in which order a token's outputs are added.
    """

    def __init__(
        self,
        ctx: LayerContext,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        names: ExpertNames | None = None,
        num_identities: int = 0,
    ) -> None:
        super().__init__()
        self.names = names or ExpertNames()
        self.num_experts = num_experts
        self.num_identities = num_identities
        self.sizes = (intermediate_size, hidden_size)
        self.order = ctx.switches.get("moe_combine_order", "rank")
        self.stacked = False
        self.gate_up_proj: nn.Parameter | None = self.new_weight(
            (num_experts, 2 * intermediate_size, hidden_size), ctx.dtype
        )
        self.down_proj: nn.Parameter | None = self.new_weight((num_experts, hidden_size, intermediate_size), ctx.dtype)
        self.experts = ctx.operator(
            "moe.experts",
            dtypes={"x": ctx.dtype, "weight": ctx.dtype},
            facts={"experts": num_experts, "hidden": hidden_size, "intermediate": intermediate_size},
        )
        self.packed: tuple[Any, Any] = (None, None)

    def choose_form(self, prefix: str, stored: Collection[str]) -> None:
        self.stacked = f"{self.names.rename(prefix)}.gate_up_proj" in stored

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, TensorTarget]]:
        prefix = self.names.rename(prefix)
        if self.stacked:
            yield from super().checkpoint_tensors(prefix)
            return
        intermediate, hidden = self.sizes
        for expert in range(self.num_experts):
            gate, up, down = self._single_names(prefix, expert)
            at = (expert,)
            yield gate, TensorTarget(self, "gate_up_proj", (intermediate, hidden), 0, at)
            yield up, TensorTarget(self, "gate_up_proj", (intermediate, hidden), intermediate, at)
            yield down, TensorTarget(self, "down_proj", (hidden, intermediate), 0, at)

    def bundles(self, prefix: str) -> Iterator[tuple[str, Bundle]]:
        """The two stacked tensors of transformers' models, which may hold rows for the identities too."""
        intermediate, hidden = self.sizes
        rows = dict.fromkeys((self.num_experts, self.num_experts + self.num_identities))
        gate_up: dict[str, tuple[int | slice, ...]] = {}
        down: dict[str, tuple[int | slice, ...]] = {}
        for expert in range(self.num_experts):
            gate_name, up_name, down_name = self._single_names(self.names.rename(prefix), expert)
            gate_up[gate_name] = (expert, slice(0, intermediate))
            gate_up[up_name] = (expert, slice(intermediate, None))
            down[down_name] = (expert,)
        yield f"{prefix}.gate_up_proj", Bundle(tuple((n, 2 * intermediate, hidden) for n in rows), gate_up)
        yield f"{prefix}.down_proj", Bundle(tuple((n, hidden, intermediate) for n in rows), down)

    def _single_names(self, prefix: str, expert: int) -> tuple[str, str, str]:
        """What a checkpoint calls the gate, up and down projection of one expert."""
        names = self.names
        gate, up, down = (f"{prefix}.{expert}.{part}.weight" for part in (names.gate, names.up, names.down))
        return gate, up, down

    def pack(self) -> None:
        assert self.gate_up_proj is not None
        assert self.down_proj is not None
        gate_up = self.experts.prepare(self.gate_up_proj.data)
        self.gate_up_proj = None
        self.packed = (gate_up, self.experts.prepare(self.down_proj.data))
        self.down_proj = None

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T,H], weights and ids [T,k] -> [T,H]."""
        out: torch.Tensor = self.experts(x, *self.packed, weights, ids, self.order)
        return out


class SparseMoE(nn.Module):
    """`gate` and `experts` of a checkpoint; the output of `shared_experts`, if any, is added in the model's dtype."""

    def __init__(self, gate: Router, experts: Experts, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T,H] -> [T,H]."""
        out: torch.Tensor = self.experts(x, *self.gate(x))
        return out if self.shared_experts is None else out + self.shared_experts(x)
