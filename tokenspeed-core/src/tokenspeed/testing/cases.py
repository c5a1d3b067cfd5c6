"""Cases: units of work that a kernel computes in arrangements of our choice, and the results unit by unit.

A *side* says how the units are put into calls and under which circumstances; a case evaluates a kernel on a side. Every
check compares two sides, or a side with the reference. Sides are data, so that a failure can be written to a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.testing.inputs import NEIGHBOURS, Recipe, make_rows, subjects_of
from tokenspeed.testing.memory import Fresh, Layout, circumstances, place
from tokenspeed.testing.subject import Subject

Results = Mapping[int, tuple[torch.Tensor, ...]]
"""What was computed for each unit, by unit; on the CPU."""


@dataclass(frozen=True)
class Side:
    """One way to evaluate a case.

    `calls` lists the units of each call, in order; a unit may come again, and its last result counts. `layout` and
    `fresh` are about memory; `threads` None leaves torch's. `pages` seeds the order of KV pages, `filler` is what
    unwritten slots hold, and `padding` adds rows that belong to no sequence. `again` keeps the packed weights of an
    earlier side.
    """

    calls: tuple[tuple[int, ...], ...]
    layout: Layout = "plain"
    fresh: Fresh = "as it comes"
    threads: int | None = None
    pages: int = 0
    filler: float = 0.0
    padding: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data (NaN as a string, since JSON has none)."""
        return {**asdict(self), "filler": str(self.filler)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Side:
        """Read `as_dict()` back."""
        calls = tuple(tuple(call) for call in data["calls"])
        return cls(**{**data, "calls": calls, "filler": float(data["filler"])})


class Case(Protocol):
    """Units to be computed by any kernel of one operator."""

    recipe: Recipe

    @property
    def subjects(self) -> tuple[int, ...]:
        """Units whose results are compared."""

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Units that keep them company."""

    def evaluate(self, subject: Subject, side: Side) -> Results:
        """Run the calls of a side; the last result of every unit in them."""

    def arguments(self, subject: Subject, side: Side) -> dict[str, Any]:
        """The arguments of the side's first call, weights packed."""


class RowCase:
    """Rows of an operator whose arguments are by row or shared."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        count = subjects_of(recipe) + NEIGHBOURS
        self.shared, self.by_row = make_rows(recipe, count)
        self.count = count

    def store_weights(self, subject: Subject) -> None:
        """Round the weights to what the format of a kernel can hold, so that the reference computes with the same."""
        for role in OPERATORS[self.recipe.operator].weights if subject.quantise else ():
            weight = self.shared[role]
            assert isinstance(weight, torch.Tensor)
            assert subject.quantise
            self.shared[role] = subject.quantise(weight)[1].to(weight.dtype)

    @property
    def subjects(self) -> tuple[int, ...]:
        """The ordinary rows."""
        return tuple(range(self.count - NEIGHBOURS))

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The loud rows."""
        return tuple(range(self.count - NEIGHBOURS, self.count))

    def evaluate(self, subject: Subject, side: Side) -> Results:
        """Run the calls of a side with weights packed for it."""
        results: dict[int, tuple[torch.Tensor, ...]] = {}
        with circumstances(threads=side.threads, fresh=side.fresh):
            packed = self._packed(subject)
            for units in side.calls:
                found = subject.call(self._call(subject, packed, units, side.layout))
                out = [_without_payload(self.recipe.operator, tensor.to("cpu")) for tensor in found]
                for at, unit in enumerate(units):
                    results[unit] = tuple(tensor[at] for tensor in out)
        return results

    def arguments(self, subject: Subject, side: Side) -> dict[str, Any]:
        """The arguments of the first call."""
        return self._call(subject, self._packed(subject), side.calls[0], side.layout)

    def _packed(self, subject: Subject) -> dict[str, Any]:
        packed = dict(self.shared)
        for role, value in self.shared.items():
            if isinstance(value, torch.Tensor):
                moved = value.to(subject.device)
                packed[role] = subject.pack(moved) if role in OPERATORS[self.recipe.operator].weights else moved
        return packed

    def _call(
        self, subject: Subject, packed: Mapping[str, Any], units: Sequence[int], layout: Layout
    ) -> dict[str, Any]:
        index = torch.tensor(units, dtype=torch.int64)
        rows = {role: place(value[index].to(subject.device), layout).view for role, value in self.by_row.items()}
        return {**packed, **rows}


def _without_payload(operator: str, tensor: torch.Tensor) -> torch.Tensor:
    """`sampling` operators return NaN as a value, "no number", which has no bits of its own."""
    is_value = operator.startswith("sampling.") and tensor.is_floating_point()
    return torch.where(tensor.isnan(), torch.nan, tensor) if is_value else tensor


def one_call(units: Sequence[int], **more: Any) -> Side:
    """A side of a single call."""
    return Side((tuple(units),), **more)


def each_alone(units: Sequence[int], **more: Any) -> Side:
    """A side with one call for each unit."""
    return Side(tuple((unit,) for unit in units), **more)


def without(side: Side, call: int, units: Sequence[int]) -> Side:
    """The side with one call's units replaced; no call at all when nothing is left."""
    calls = list(side.calls)
    calls[call : call + 1] = [tuple(units)] if units else []
    return replace(side, calls=tuple(calls))
