"""How an operator is described."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """One argument: `role` is the name that kernels and dtype signatures use, `shape` its axes, `dtype` fixed or free.

    A free dtype is written `$role` and is chosen by the signature; `optional` arguments may be None. `default` is what
    an argument is when a call leaves it out, as Python spells it.
    """

    role: str
    shape: str
    dtype: str
    meaning: str
    optional: bool = False
    default: str = ""


def scalar(role: str, dtype: str, meaning: str, default: str = "") -> Argument:
    """An argument that is a plain Python value."""
    return Argument(role, "", dtype, meaning, default=default)


@dataclass(frozen=True)
class Operator:
    """One computation that kernels implement; they take `arguments` in this order.

    `reference` is the `module:function` that computes it in plain torch. `weights` are the roles that `prepare_weights`
    may repack once at load; the kernel then receives what it returned. `links` are traits whose value must be the same
    for every operator of the plan that carries the trait (the layout of the KV cache). `agreement` is the largest
    relative error against the reference that the conformance kit accepts, for each output dtype.
    """

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    returns: tuple[Argument, ...]
    reference: str
    weights: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    agreement: tuple[tuple[str, float], ...] = (("float32", 2e-5), ("bfloat16", 1.6e-2), ("float16", 2e-3))

    @property
    def call(self) -> str:
        """The Python call form, such as `gemm.linear(x, weight, bias=None) -> out`."""
        taken = ", ".join(f"{arg.role}={arg.default}" if arg.default else arg.role for arg in self.arguments)
        given = ", ".join(result.role for result in self.returns)
        return f"{self.name}({taken}) -> {f'({given})' if len(self.returns) > 1 else given or 'None'}"
