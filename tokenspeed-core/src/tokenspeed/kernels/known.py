"""Which distribution to install for what: a hint for refusals, and nothing else.

Core imports no plugin, so what the published distributions offer is written down here. Nothing is selected by this
table; a name in it has no privilege over a stranger's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tokenspeed.kernels.spec import BATCH_INVARIANT, Need, TraitValue


@dataclass(frozen=True)
class KnownDistribution:
    """A published distribution: what to type to install it, and what it is good for.

    `operators` are operator families (`gemm`, `attention`); `devices` where its kernels run; `features` what its
    kernels declare, and `traits` the trait values that they declare beside `kv_layout`.
    """

    name: str
    install: str
    operators: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    traits: frozenset[tuple[str, TraitValue]] = frozenset()


KNOWN_DISTRIBUTIONS = (
    KnownDistribution(
        "tokenspeed-kernels-aok",
        "pip install 'tokenspeed[aok]'",
        operators=frozenset(
            {"embedding", "gemm", "norm", "rope", "activation", "cache", "attention", "moe", "sampling"}
        ),
        devices=frozenset({"cpu", "cuda"}),
        features=frozenset({BATCH_INVARIANT}),
        traits=frozenset(
            {
                ("combine_order", "slot"),
                ("slot_order", "sorted"),
                ("block_order", "aok_tree"),
                ("stream", "per-request"),
            }
        ),
    ),
    KnownDistribution(
        "tokenspeed-kernels-flashinfer",
        "pip install 'tokenspeed[flashinfer]'",
        operators=frozenset({"norm", "rope", "activation", "attention", "moe", "sampling"}),
        devices=frozenset({"cuda"}),
    ),
    KnownDistribution("tokenspeed-models", "pip install 'tokenspeed[models]'"),
)


def suppliers(need: Need, device: str, installed: Collection[str]) -> tuple[KnownDistribution, ...]:
    """Known distributions that are not installed and that publish kernels for `need` on `device`."""
    return tuple(
        known for known in KNOWN_DISTRIBUTIONS if known.name not in installed and _publishes(known, need, device)
    )


def may_serve(distribution: str, need: Need, device: str) -> bool:
    """Whether `distribution`, which could not be loaded, might offer a kernel for `need`: a stranger always might."""
    return all(_publishes(known, need, device) for known in KNOWN_DISTRIBUTIONS if known.name == distribution)


def offers_models(distribution: str) -> bool:
    """Whether `distribution` may offer models: true of all but the known kernel distributions."""
    return not any(known.operators for known in KNOWN_DISTRIBUTIONS if known.name == distribution)


def _publishes(known: KnownDistribution, need: Need, device: str) -> bool:
    return (
        need.operator.partition(".")[0] in known.operators
        and device in known.devices
        and need.features <= known.features
        and known.traits.issuperset(need.traits)
    )
