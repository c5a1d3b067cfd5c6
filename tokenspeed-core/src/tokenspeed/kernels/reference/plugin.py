"""The reference kernels as a plugin: every operator, on any device, in plain torch; chosen only when nothing better is.

They promise nothing: a row's bits may depend on its neighbours, as they do in torch. Beside them there is one kernel
that does promise, `torch.sampling.logprobs`: log-probabilities in torch's own order, for trainers that use it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed.hookspecs import hookimpl
from tokenspeed.kernels.operators import OPERATORS, Operator
from tokenspeed.kernels.spec import BATCH_INVARIANT, KernelSpec, MachineRequirement, Priority, TraitValue, trait_table

TOKENSPEED_API = 1

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")

_TRAITS: dict[str, dict[str, tuple[TraitValue, ...]]] = {
    "moe.route": {"form": ("fused", "torch")},
    "moe.experts": {"combine_order": ("rank", "slot")},
    "sampling.sample": {"stream": ("per-request",)},
    "attention.sparse_paged": {"slot_order": ("selection", "sorted")},
}


def _spec(operator: Operator, device: str) -> KernelSpec:
    arguments = (*operator.arguments, *operator.returns)
    roles = sorted({argument.dtype[1:] for argument in arguments if argument.dtype.startswith("$")})
    traits: dict[str, tuple[TraitValue, ...]] = {}
    if "kv_layout" in operator.links:
        traits["kv_layout"] = ("nhd",)
    if operator.name in ("sampling.block_sumexp", "sampling.logprobs"):
        traits["block_order"] = ("torch_sum",)
    traits.update(_TRAITS.get(operator.name, {}))
    return KernelSpec(
        name=f"reference.{operator.name}" + ("" if device == "cpu" else f".{device}"),
        operator=operator.name,
        solution="reference",
        implementation=operator.reference,
        signatures=tuple(dict.fromkeys(roles, dtype) for dtype in (DTYPES if roles else DTYPES[:1])),
        machine=MachineRequirement(device=device),
        traits=trait_table(traits),
        priority=Priority.REFERENCE,
    )


_IN_TORCH_ORDER = KernelSpec(
    name="torch.sampling.logprobs",
    operator="sampling.logprobs",
    solution="torch",
    implementation="tokenspeed.kernels.reference.torch_order:logprobs",
    signatures=tuple({"logits": dtype} for dtype in DTYPES),
    machine=MachineRequirement(device="cpu"),
    features=frozenset({BATCH_INVARIANT}),
    traits=trait_table({"block_order": {"torch_sum"}}),
    priority=Priority.REFERENCE,
    variant="tokenspeed.kernels.reference.torch_order:variant",
)


@hookimpl
def tokenspeed_kernels() -> Iterable[KernelSpec]:
    """One kernel for each operator and device, and the one in torch's order."""
    return [*(_spec(operator, device) for operator in OPERATORS.values() for device in DEVICES), _IN_TORCH_ORDER]
