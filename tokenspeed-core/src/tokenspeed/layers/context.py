"""How a layer asks for operators while it is built, and calls them when it runs.

A model is built on the `meta` device first. Every layer asks its `LayerContext` for the operators that it will call;
the context records the need and hands back an `Operation` that is not bound to a kernel yet. Selection then binds
every operation at once, so a layer names no kernel and no vendor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenspeed.kernels.spec import KernelSpec, Need, TraitValue


class Operation:
    """One call site of an operator: `operation(...)` runs the chosen kernel.

    `need` is what the layer asked for; `prepare` repacks weights once at load (the identity when the kernel has no
    packing of its own); `kernel` describes the bound kernel. Calling an unbound operation is a programming error.
    """

    __slots__ = ("kernel", "need", "prepare", "run")

    def __init__(self, need: Need) -> None:
        self.need = need
        self.run: Callable[..., Any] = _unbound
        self.prepare: Callable[..., Any] = lambda weight: weight
        self.kernel: KernelSpec | None = None

    def bind(
        self, run: Callable[..., Any], prepare: Callable[..., Any] | None, kernel: KernelSpec | None = None
    ) -> None:
        """Attach the chosen kernel; called once, by the plan."""
        self.run = run
        self.kernel = kernel
        if prepare is not None:
            self.prepare = prepare

    def reads_packing_of(self, other: Operation) -> bool:
        """Whether this kernel takes the weight that `other`'s kernel prepared, by its trait `reads_packing_of`."""
        if self.kernel is None or other.kernel is None:
            return False
        return other.kernel.name in self.kernel.traits.get("reads_packing_of", ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _unbound(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("this operation is not bound to a kernel; bind the plan before running the model")


@dataclass
class LayerContext:
    """What a layer may know while it is built: the dtype of weights and activations, the switches, and operators.

    `switches` maps a switch name (`layer_boundary_norm`) to its resolved value; a layer reads the values that concern
    it and keeps them. `features` and `traits` are required of every operator (`traits` by operator name).
    `weight_format` is how a quantised checkpoint stores the weights of projections; empty where it does not.
    """

    dtype: torch.dtype
    switches: Mapping[str, str] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    traits: Mapping[str, Mapping[str, TraitValue]] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    weight_format: str = ""

    def operator(
        self,
        name: str,
        *,
        dtypes: Mapping[str, torch.dtype],
        facts: Mapping[str, TraitValue] | None = None,
        traits: Mapping[str, TraitValue] | None = None,
    ) -> Operation:
        """Record that the caller will call operator `name` with these dtypes and shape facts."""
        need = Need.of(
            name,
            dtypes={role: dtype_name(dtype) for role, dtype in dtypes.items()},
            facts=facts,
            features=self.features,
            traits={**self.traits.get(name, {}), **(traits or {})},
        )
        operation = Operation(need)
        self.operations.append(operation)
        return operation

    def needs(self) -> Iterable[Need]:
        """The distinct needs, in the order in which they were first asked for."""
        return dict.fromkeys(operation.need for operation in self.operations)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
