"""The kernels of this distribution as data. Imports neither torch nor flashinfer.

No kernel here declares `batch_invariant`: flashinfer picks tiles, splits and vector widths by the size of the batch,
and a claim is only made for what the conformance kit has passed on a GPU. `sampling.sample` draws from flashinfer's own
stream, which is the trait `stream=batch`; where the stream of the request is asked for, another kernel serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenspeed.kernels.spec import KernelSpec, MachineRequirement, Priority, TraitValue, trait_table

ARCHITECTURES = ("sm80", "sm86", "sm89", "sm90", "sm100")

HEAD_DIMS = (64, 128, 256)
GROUP_SIZES = (1, 2, 4, 8)
"""What flashinfer compiles its paged attention for without options of our own."""

_MACHINE = MachineRequirement(device="cuda", arch=frozenset(ARCHITECTURES), libraries=frozenset({"flashinfer"}))
_HALVES = ("bfloat16", "float16")
_FLOATS = (*_HALVES, "float32")
_ATTENTION: Mapping[str, Iterable[TraitValue]] = {
    "kv_layout": ("nhd",),
    "head_dim": HEAD_DIMS,
    "group_size": GROUP_SIZES,
}


def _spec(
    operator: str,
    implementation: str,
    *roles: str,
    suffix: str = "",
    traits: Mapping[str, Iterable[TraitValue]] | None = None,
    priority: int = Priority.PERFORMANT + 1,
    dtypes: tuple[str, ...] = _HALVES,
) -> KernelSpec:
    return KernelSpec(
        name=f"flashinfer.{operator}{suffix}",
        operator=operator,
        solution="flashinfer",
        implementation=f"tokenspeed_kernels_flashinfer.{implementation}",
        signatures=tuple(dict.fromkeys(roles, dtype) for dtype in dtypes),
        machine=_MACHINE,
        traits=trait_table(traits or {}),
        priority=priority,
    )


_MLA: Mapping[str, Iterable[TraitValue]] = {"latent_dim": (512,), "width": (576,)}
"""The sizes of DeepSeek's models, which every one of flashinfer's implementations takes."""

_EXPERTS: Mapping[str, Iterable[TraitValue]] = {
    "combine_order": ("rank",),
    "hidden": range(64, 16385, 64),
    "intermediate": range(64, 16385, 64),
}
"""Rows of whole 128 bytes."""

SPECS: tuple[KernelSpec, ...] = (
    _spec("norm.rms", "rows:rms_norm", "x", "weight"),
    _spec("norm.add_rms", "rows:add_rms_norm", "x", "weight"),
    _spec("rope.apply", "rows:rope", "x"),
    _spec("activation.silu_and_mul", "rows:silu_and_mul", "x"),
    _spec("attention.mla_paged", "mla:paged", "x", "kv", traits=_MLA),
    _spec("moe.experts", "experts:experts", "x", "weight", traits=_EXPERTS),
    _spec("sampling.sample", "sampling:sample", "logits", dtypes=_FLOATS, traits={"stream": ("batch",)}),
    _spec("attention.paged", "attention:paged", "x", "kv", traits=_ATTENTION),
    # One KV split for each row: what may be batch invariant. It is below the other, so that only a pin chooses it.
    _spec(
        "attention.paged",
        "attention:paged_unsplit",
        "x",
        "kv",
        suffix=".unsplit",
        traits=_ATTENTION,
        priority=Priority.PORTABLE,
    ),
)
