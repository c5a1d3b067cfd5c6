"""How a function becomes an operator of `torch.library`, with a fake (shapes without work) and a backward pass.

Fakes and backward formulas say by the names of their parameters which of the operator's arguments they read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.library import custom_op

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

Function = Callable[..., Any]


class Operator:
    """An operator of `torch.library`, as a function. It has no forward-mode derivative, and refuses to pass for one
    whose derivative is zero."""

    def __init__(self, defined: CustomOpDef) -> None:
        self._defined = defined
        self.register_autograd = defined.register_autograd

    def __call__(self, *inputs: Any) -> Any:
        if not torch.compiler.is_compiling() and any(map(_has_tangent, inputs)):
            raise NotImplementedError(
                "the operators of an adopted model and `logprobs` have gradients by backward passes only, not by "
                "forward-mode differentiation (torch.func.jvp, jacfwd)"
            )
        return self._defined(*inputs)


def _has_tangent(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    tangent: torch.Tensor | None = forward_ad.unpack_dual(value).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def operator(
    name: str, *, fake: Function, backward: Function | None = None, of: tuple[str, ...] = ()
) -> Callable[[Function], Operator]:
    """Register the decorated function, which changes none of its arguments, as the operator `name`.

    `fake` returns empty outputs. `backward` returns the gradients of the arguments `of`, in that order; its first
    parameters, `grad` or `grad_…`, are the gradients of the outputs. Their other parameters are arguments of the
    operator, and a backward pass keeps no others. Raises TypeError where one names no argument.
    """

    def register(function: Function) -> Operator:
        arguments = tuple(inspect.signature(function).parameters)
        defined = custom_op(name, mutates_args=())(function)
        fake_reads = _reads(fake, arguments)
        defined.register_fake(lambda *inputs: fake(**_chosen(fake_reads, arguments, inputs)))
        if backward is not None:
            _register_backward(defined, arguments, backward, of)
        return Operator(defined)

    return register


def _register_backward(
    defined: CustomOpDef, arguments: tuple[str, ...], formula: Function, of: tuple[str, ...]
) -> None:
    reads, of = _reads(formula, arguments), _known(of, arguments)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
        kept = _chosen(reads, arguments, inputs)
        tensors = {name: value for name, value in kept.items() if isinstance(value, torch.Tensor)}
        ctx.save_for_backward(*tensors.values())
        ctx.tensors = tuple(tensors)
        ctx.values = {name: value for name, value in kept.items() if name not in tensors}

    def run(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        found = formula(*grads, **saved, **ctx.values)
        by_name = dict(zip(of, found if isinstance(found, tuple) else (found,), strict=True))
        return tuple(by_name.get(name) for name in arguments)

    defined.register_autograd(run, setup_context=setup)


def _reads(function: Function, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The parameters of `function` that are arguments of the operator: all but the gradients of its outputs."""
    return _known([name for name in inspect.signature(function).parameters if not name.startswith("grad")], arguments)


def _known(names: Sequence[str], arguments: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [name for name in names if name not in arguments]:
        raise TypeError(f"{', '.join(unknown)}: the operator takes {', '.join(arguments)}")
    return tuple(names)


def _chosen(names: tuple[str, ...], arguments: tuple[str, ...], inputs: tuple[Any, ...]) -> dict[str, Any]:
    return {name: inputs[arguments.index(name)] for name in names}
