"""A kernel under test with the inputs that several checks share, and how a check reports a fault.

A check knows operators only by their description. Expected bits are always the kernel's own, computed for each unit
alone, in plain memory, on one thread; expected values are the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.kernels.spec import BATCH_INVARIANT, KernelSpec
from tokenspeed.testing.cases import Case, Results, RowCase, Side, each_alone
from tokenspeed.testing.compare import first_difference
from tokenspeed.testing.inputs import CANCEL, CHARACTERS, SCALAR_TRAITS, SUBJECTS, Recipe, recipes
from tokenspeed.testing.paged import FAMILIES, AttentionCase, WriteCase
from tokenspeed.testing.subject import Subject, reference_subject

FEW = 2 * SUBJECTS
"""Units that are computed one by one again and again."""

BATCH_SIZES = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 257, 300)
"""Rows in a call: around the sizes at which kernels were seen to change their tiles."""


FACT_AXES = {
    "experts": "E",
    "groups": "G",
    "head_dim": "D",
    "heads": "Hq",
    "hidden": "H",
    "index_heads": "Hi",
    "intermediate": "F",
    "k": "K",
    "latent_dim": "R",
    "n": "N",
    "rotary_dim": "R",
    "top_k": "k",
    "width": "C",
}
"""The axis that a shape fact of a need speaks of."""


@dataclass(frozen=True)
class Fault:
    """A claim that does not hold, and the inputs that show it.

    `expected` and `got` are the sides that differ (None, None where the fault is not a difference of two sides); when
    `expected` is None and `got` is not, the reference is what was expected.
    """

    summary: str
    recipe: Recipe | None = None
    unit: int = -1
    expected: Side | None = None
    got: Side | None = None


@dataclass(frozen=True)
class Workload:
    """How much is tried: rows in a call, one recipe (`few`) or all, sizes of a model (`shapes`) or the kit's own."""

    batch_sizes: Sequence[int] = BATCH_SIZES
    few: bool = False
    shapes: tuple[Mapping[str, int], ...] = ()

    def recipes(self, subject: Subject, characters: Sequence[str] = CHARACTERS) -> Iterator[Recipe]:
        """The recipes to try, small to large."""
        make = paged_recipes if subject.is_paged else recipes
        found = make(subject.spec.operator, subject.dtypes, characters=characters, few=self.few)
        declared = (declared_sizes(recipe, subject.spec) for recipe in found if _is_declared(recipe, subject.spec))
        if self.shapes:
            first = next(declared)
            yield from (replace(first, sizes={**first.sizes, **sizes}) for sizes in self.shapes)
        else:
            yield from declared


def _is_declared(recipe: Recipe, spec: KernelSpec) -> bool:
    role, trait = SCALAR_TRAITS.get(recipe.operator, ("", ""))
    return trait not in spec.traits or recipe.scalars[role] in spec.traits[trait]


_KV_SHAPES: Sequence[Mapping[str, int]] = ({"Hq": 2, "Hkv": 1, "D": 16}, {"Hq": 6, "Hkv": 2, "D": 64})
_LATENT_SHAPES: Sequence[Mapping[str, int]] = ({"Hq": 2, "C": 24, "R": 16}, {"Hq": 5, "C": 96, "R": 64})
_PAGED_SHAPES: Mapping[str, Sequence[Mapping[str, int]]] = {
    "attention.index_scores": ({"Hi": 2, "C": 24}, {"Hi": 19, "C": 96}),
    "attention.sparse_paged": ({"Hq": 2, "C": 24, "R": 16, "k": 3}, {"Hq": 5, "C": 96, "R": 64, "k": 18}),
}
_PAGED_SCALARS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "attention.paged": ({"window": 0}, {"window": 7}),
    "attention.sparse_paged": ({"order": "sorted"}, {"order": "selection"}),
}


def declared_sizes(recipe: Recipe, spec: KernelSpec) -> Recipe:
    """The recipe with every size that the kernel does not declare moved to the nearest one that it does."""
    sizes = recipe.sizes
    for fact in OPERATORS[spec.operator].facts:
        declared = sorted(value for value in spec.traits.get(fact, ()) if isinstance(value, int))
        axis = FACT_AXES.get(fact, "")
        now = sizes["Hq"] // sizes["Hkv"] if fact == "group_size" else sizes.get(axis)
        if declared and now is not None and now not in declared:
            sizes = with_fact(sizes, fact, min(declared, key=lambda value: abs(value - now)))
    return recipe if sizes is recipe.sizes else replace(recipe, sizes=sizes)


def with_fact(sizes: Mapping[str, int], fact: str, value: int) -> Mapping[str, int]:
    """Sizes of which a shape fact has this value."""
    if fact == "group_size":
        return {**sizes, "Hq": value * sizes["Hkv"]}
    return {**sizes, FACT_AXES[fact]: value}


def paged_recipes(
    operator: str, dtypes: Mapping[str, str], *, characters: Sequence[str] = CHARACTERS, few: bool = False
) -> Iterator[Recipe]:
    """The recipes of the operators over the KV cache."""
    sizes = _PAGED_SHAPES.get(operator, _LATENT_SHAPES if FAMILIES[operator].caches == ("cache",) else _KV_SHAPES)
    attends = operator.startswith("attention.")
    windows = _PAGED_SCALARS.get(operator, ({},))
    for size in sizes[-1:] if few else sizes:
        for scalars in windows[:1] if few else windows:
            # Writing, windows and orders know nothing of values.
            for character in characters[:1] if few or scalars != windows[0] or not attends else characters:
                yield Recipe(operator, size, dtypes, character, scalars)


def make_case(recipe: Recipe) -> Case:
    """The inputs of a recipe."""
    if recipe.operator not in FAMILIES:
        return RowCase(recipe)
    return AttentionCase(recipe) if recipe.operator.startswith("attention.") else WriteCase(recipe)


class Trial:
    """One kernel under test, with cases and results that several checks share."""

    def __init__(self, subject: Subject, work: Workload, peers: Sequence[Subject] = ()) -> None:
        self.subject = subject
        self.work = work
        self.peers = peers
        self._cases: dict[str, Case] = {}
        self._alone: dict[str, Results] = {}
        self._first: tuple[Recipe, Results] | None = None

    @cached_property
    def reference(self) -> Subject:
        """The reference of the operator on the same device."""
        return reference_subject(self.subject.spec.operator, self.subject.dtypes, self.subject.spec.machine.device)

    def first_results(self) -> tuple[Recipe, Results]:
        """The results of the very first calls, of the largest plain recipe; `first_fault` sees to it that they are."""
        if self._first is None:
            recipe = [*self.work.recipes(self.subject, CHARACTERS[:1])][-1]
            case = self.case(recipe)
            self._first = recipe, case.evaluate(self.subject, self.plain(case, FEW))
        return self._first

    @property
    def writes_cache(self) -> bool:
        """Whether results are what is left in a cache."""
        return self.subject.writes_cache

    @property
    def promises_bits(self) -> bool:
        """Whether the kernel declares that a unit's bits are its own."""
        return BATCH_INVARIANT in self.subject.spec.features

    def recipes(self, characters: Sequence[str] = (CANCEL,)) -> Iterator[Recipe]:
        """The recipes to try, by default those for comparing bits."""
        return self.work.recipes(self.subject, characters)

    def case(self, recipe: Recipe) -> Case:
        """The inputs of a recipe, made once."""
        key = recipe.describe() + str(recipe.optional)
        if key not in self._cases:
            case = make_case(recipe)
            if isinstance(case, RowCase):
                case.store_weights(self.subject)
            self._cases[key] = case
        return self._cases[key]

    def plain(self, case: Case, count: int | None = None) -> Side:
        """The side that says what the bits are: every unit (or the first `count`) alone, on one thread."""
        paged = self.subject.is_paged and not self.writes_cache
        units = case.subjects if paged else (*case.subjects, *case.neighbours)
        return each_alone(units if self.writes_cache else units[:count], threads=1)

    def alone(self, case: Case) -> Results:
        """The results of `plain`, computed once."""
        key = case.recipe.describe() + str(case.recipe.optional)
        if key not in self._alone:
            self._alone[key] = case.evaluate(self.subject, self.plain(case))
        return self._alone[key]

    def compared(self, case: Case, side: Side) -> tuple[int, ...]:
        """The units that a side and `plain` have in common and that are compared."""
        return (
            (0,)
            if self.writes_cache
            else tuple(sorted({u for call in side.calls for u in call} & self.alone(case).keys()))
        )

    def same(self, case: Case, side: Side, what: str) -> Iterator[Fault]:
        """A fault when a side does not have the bits of `plain`."""
        expected = self.alone(case)
        got = case.evaluate(self.subject, side)
        units = self.compared(case, side)
        if found := first_difference(expected, got, units):
            unit, detail = found
            alone = self.plain(case) if self.writes_cache else each_alone((unit,), threads=1)
            yield Fault(f"{what}: unit {unit}: {detail}", case.recipe, unit, alone, side)
