"""The checks of the conformance kit, as data: what each one proves, and which claim it belongs to. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from tokenspeed.kernels.spec import BATCH_INVARIANT, KernelSpec

KIT_VERSION = 1
"""Raised when a check becomes stricter: what passed under one version need not pass under the next."""


@dataclass(frozen=True)
class Check:
    """One check: `proves` is one sentence, `feature` the claim without which it does not run (None: always runs)."""

    name: str
    proves: str
    feature: str | None = None


CHECKS = MappingProxyType(
    {
        check.name: check
        for check in (
            Check("import", "the functions that the spec names are there"),
            Check("agreement", "results are within the operator's measure of the reference"),
            Check("accumulation", "sums are held in fp32: integers that need more than half precision come out exact"),
            Check("empty", "no rows in, no rows out"),
            Check("writes", "inputs and the memory around them are left alone; outputs are fresh memory"),
            Check("initialised", "outputs are fully written and nothing uninitialised is read"),
            Check("refuses", "what the spec does not declare is refused, or right; never silently wrong"),
            Check("traits", "declared shapes work, and declared orders are the ones that are computed"),
            Check("order", "kernels that publish one order of additions give equal bits"),
            Check("batch", "a row alone has the bits that it has in any batch, place and company", BATCH_INVARIANT),
            Check("layout", "alignment, strides, page order and padding change no bit", BATCH_INVARIANT),
            Check("history", "earlier calls, and the batch that came first, change no bit", BATCH_INVARIANT),
            Check("threads", "the number of threads changes no bit", BATCH_INVARIANT),
        )
    }
)

DETERMINISTIC = "deterministic"
"""Trait of kernels whose bits depend on their arguments alone, if perhaps on the whole batch."""

_DETERMINISTIC_CHECKS = ("threads",)


def applies(check: str, spec: KernelSpec) -> bool:
    """Whether `check` has a claim of `spec` to prove."""
    if check == "order":
        return spec.bit_order is not None
    feature = CHECKS[check].feature
    if feature is None or feature in spec.features:
        return True
    return check in _DETERMINISTIC_CHECKS and bool(spec.traits.get(DETERMINISTIC))


def waiver_faults(spec: KernelSpec) -> list[str]:
    """What is wrong with the waivers of a spec: a reason must be written, and a declared feature cannot be waived."""
    faults = []
    for name, reason in spec.waivers.items():
        if name not in CHECKS:
            faults.append(f"waives {name!r}; the checks are {', '.join(CHECKS)}")
        elif not isinstance(reason, str) or len(reason.split()) < 3:
            faults.append(f"waives {name} without a written reason (a sentence, not {reason!r})")
        elif CHECKS[name].feature in spec.features:
            faults.append(f"waives {name}, which proves {CHECKS[name].feature}; declare the feature or the waiver")
    return faults
