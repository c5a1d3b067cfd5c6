"""The checks: each takes a kernel and yields what is wrong with it, smallest inputs first.

`names.py` says what each proves.

A check knows operators only by their description. Expected bits are always the kernel's own, computed for each unit
alone, in plain memory, on one thread; expected values are the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tokenspeed.kernels.spec import BATCH_INVARIANT, KernelSpec
from tokenspeed.testing.cases import Case, Results, RowCase, Side, each_alone, one_call
from tokenspeed.testing.compare import differing, error, is_close_call, spell_difference, tolerance
from tokenspeed.testing.inputs import CANCEL, CHARACTERS, LOUD, SCALAR_TRAITS, SUBJECTS, Recipe, recipes
from tokenspeed.testing.memory import Placed, as_bytes, circumstances, place
from tokenspeed.testing.paged import FAMILIES, AttentionCase, WriteCase
from tokenspeed.testing.probes import order_probes, probes
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
    "intermediate": "F",
    "k": "K",
    "latent_dim": "R",
    "n": "N",
    "rotary_dim": "R",
    "top_k": "k",
    "width": "C",
}
"""The axis that a shape fact of a need speaks of."""

_REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError, IndexError, AssertionError)


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
        declared = (recipe for recipe in found if _is_declared(recipe, subject.spec))
        if self.shapes:
            first = next(declared)
            yield from (replace(first, sizes={**first.sizes, **sizes}) for sizes in self.shapes)
        else:
            yield from declared


def _is_declared(recipe: Recipe, spec: KernelSpec) -> bool:
    role, trait = SCALAR_TRAITS.get(recipe.operator, ("", ""))
    return trait not in spec.traits or recipe.scalars[role] in spec.traits[trait]


def paged_recipes(
    operator: str, dtypes: Mapping[str, str], *, characters: Sequence[str] = CHARACTERS, few: bool = False
) -> Iterator[Recipe]:
    """The recipes of the operators over the KV cache."""
    if FAMILIES[operator].caches == ("cache",):
        sizes: tuple[dict[str, int], ...] = ({"Hq": 2, "C": 24, "R": 16}, {"Hq": 5, "C": 96, "R": 64})
    else:
        sizes = ({"Hq": 2, "Hkv": 1, "D": 16}, {"Hq": 6, "Hkv": 2, "D": 64})
    attends = operator.startswith("attention.")
    windows: tuple[dict[str, Any], ...] = ({"window": 0}, {"window": 7}) if operator == "attention.paged" else ({},)
    for size in sizes[-1:] if few else sizes:
        for scalars in windows[:1] if few else windows:
            # Writing and windows know nothing of values.
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
        if wrong := differing(expected, got, units):
            unit = wrong[0]
            detail = spell_difference(expected[unit], got[unit])
            alone = self.plain(case) if self.writes_cache else each_alone((unit,), threads=1)
            yield Fault(f"{what}: unit {unit}: {detail}", case.recipe, unit, alone, side)


Checker = Callable[[Trial], Iterable[Fault]]


def agreement(trial: Trial) -> Iterator[Fault]:
    """Every character of values at every size, whole batches, against the reference."""
    for recipe in trial.work.recipes(trial.subject):
        case = trial.case(recipe)
        yield from _agrees(trial, case, one_call(case.subjects if trial.subject.is_paged else case.subjects[:FEW]))


def _agrees(trial: Trial, case: Case, side: Side, measure: float | None = None) -> Iterator[Fault]:
    if isinstance(case, WriteCase):
        everything = replace(side, calls=((*case.subjects, *case.neighbours),))
        got, expected = case.read_back(trial.subject, everything), case.read_back(trial.reference, everything)
    else:
        got, expected = case.evaluate(trial.subject, side), case.evaluate(trial.reference, side)
    for unit in (unit for unit in expected if unit in case.subjects or unit in got):
        if len(got[unit]) != len(expected[unit]):
            yield Fault(f"{len(got[unit])} outputs, expected {len(expected[unit])}", case.recipe, unit, None, side)
            return
        for a, b in zip(got[unit], expected[unit], strict=True):
            allowed = tolerance(trial.subject.operator, b.dtype) if measure is None else measure
            off = error(trial.subject.operator, a, b)
            if off > allowed and not _close_call(trial, case, side, unit, a):
                how = f"off by {off:.3g}, allowed {allowed:.3g}; " if off < float("inf") else ""
                detail = spell_difference((b,), (a,))
                yield Fault(f"unit {unit}: {how}{detail}", case.recipe, unit, None, side)
                return


def _close_call(trial: Trial, case: Case, side: Side, unit: int, chosen: torch.Tensor) -> bool:
    if trial.subject.spec.operator != "sampling.sample" or chosen.dim():
        return False
    arguments = case.arguments(trial.reference, side)
    return is_close_call(trial.reference.run, arguments, side.calls[0].index(unit), int(chosen))


def accumulation(trial: Trial) -> Iterator[Fault]:
    """Values whose sum is exact in fp32 in any order, and wrong in anything narrower."""
    if trial.subject.is_paged:
        if trial.subject.spec.operator == "attention.paged":
            recipe = Recipe(
                "attention.paged",
                {"Hq": 2, "Hkv": 1, "D": 16},
                trial.subject.dtypes,
                "accumulation",
                {"window": 0, "lengths": (1, 1200)},
            )
            case = trial.case(recipe)
            yield from _agrees(trial, case, one_call(case.subjects[-1:]))
        return
    for probe in probes(trial.subject.spec.operator, trial.subject.dtypes):
        if not probe.survives(trial.subject):
            continue
        out = trial.subject.call(probe.placed(trial.subject))
        for a, b in zip(out, probe.expected, strict=True):
            off = error(trial.subject.operator, a.to("cpu"), b)
            # What a weight format holds is exact but for the rounding of its scale.
            if off > (tolerance(trial.subject.operator, b.dtype) if trial.subject.quantise else probe.measure):
                yield Fault(f"{probe.name}: {spell_difference((b,), (a.to('cpu'),))}")
                return


def empty(trial: Trial) -> Iterator[Fault]:
    """A call without units."""
    recipe = next(trial.work.recipes(trial.subject))
    case = trial.case(recipe)
    side = Side(((),))
    if trial.writes_cache:
        untouched = case.evaluate(trial.subject, Side(()))
        yield from (
            Fault("writing nothing changed the cache", recipe)
            for _ in differing(untouched, case.evaluate(trial.subject, side), [0])
        )
        return
    out = trial.subject.call(case.arguments(trial.subject, side))
    expected = trial.reference.call(case.arguments(trial.reference, side))
    shapes = [(list(t.shape), t.dtype) for t in out], [(list(t.shape), t.dtype) for t in expected]
    if shapes[0] != shapes[1]:
        yield Fault(f"without rows the outputs are {shapes[0]}, expected {shapes[1]}", recipe)


def writes(trial: Trial) -> Iterator[Fault]:
    """Guards around every argument, and outputs that share no memory with an argument or an earlier output."""
    for recipe in _one_each(trial):
        case = trial.case(recipe)
        whole = one_call((*case.subjects, *case.neighbours))
        arguments = case.arguments(trial.subject, whole)
        guarded: dict[str, Placed] = {}
        written = set(FAMILIES[recipe.operator].caches) if trial.writes_cache else set()
        for role, value in arguments.items():
            if isinstance(value, torch.Tensor):
                guarded[role] = place(value, "plain")
                arguments[role] = guarded[role].view
        before = {role: placed.view.clone() for role, placed in guarded.items() if role in written}
        out = trial.subject.call(arguments)
        for role, placed in guarded.items():
            if role in written:
                slots = arguments["slots"]
                yield from _wrote_elsewhere(recipe, role, placed, before[role], slots)
            elif not placed.untouched():
                yield Fault(f"wrote to its argument {role}, or to memory around it", recipe)
        yield from _shared_memory(trial, recipe, case, guarded, out)


def _wrote_elsewhere(
    recipe: Recipe, role: str, placed: Placed, before: torch.Tensor, slots: torch.Tensor
) -> Iterator[Fault]:
    pages = {int(slot) // before.shape[1] for slot in slots.tolist() if slot >= 0}
    others = [page for page in range(len(before)) if page not in pages]
    if not torch.equal(as_bytes(placed.view[others]), as_bytes(before[others])):
        yield Fault(f"wrote to pages of {role} that no slot names", recipe)
    inside = placed.view.numel() * placed.view.element_size()
    start = placed.view.storage_offset() * placed.view.element_size()
    now, then = as_bytes(placed.buffer), placed.before
    around = torch.cat((now[:start], now[start + inside :])), torch.cat((then[:start], then[start + inside :]))
    if not torch.equal(*around):
        yield Fault(f"wrote around {role}", recipe)


def _shared_memory(
    trial: Trial, recipe: Recipe, case: Case, guarded: Mapping[str, Placed], out: tuple[torch.Tensor, ...]
) -> Iterator[Fault]:
    owned = {placed.buffer.untyped_storage().data_ptr(): role for role, placed in guarded.items()}
    for number, tensor in enumerate(out):
        role = owned.get(tensor.untyped_storage().data_ptr())
        if tensor.numel() and role is not None:
            yield Fault(f"output {number} is a view of its argument {role}", recipe)
    kept = [tensor.clone() for tensor in out]
    reversed_side = one_call((*case.subjects, *case.neighbours)[::-1])
    trial.subject.call(case.arguments(trial.subject, reversed_side))
    if any(not torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(kept, out, strict=True)):
        yield Fault("a later call changed the output of an earlier one", recipe)


def initialised(trial: Trial) -> Iterator[Fault]:
    """Fresh memory full of NaN, and of large numbers; unwritten cache slots likewise."""
    for recipe in _one_each(trial, ("plain",)):
        case = trial.case(recipe)
        # The NaN mode of torch imports its compiler, which takes seconds.
        kinds = (("large", LOUD),) if trial.work.few else (("nan", float("nan")), ("large", LOUD))
        for fresh, filler in kinds:
            for units in (case.subjects, case.subjects[:1], case.subjects[:3]):
                side = Side((tuple(units),), fresh=fresh, filler=filler)  # type: ignore[arg-type]
                if trial.writes_cache:
                    yield from _agrees(trial, case, side)
                elif _exact(trial):
                    yield from _unmoved(trial, case, replace(side, fresh="as it comes", filler=0.0), side)
                else:
                    yield from _agrees(trial, case, side)


def _unmoved(trial: Trial, case: Case, before: Side, after: Side) -> Iterator[Fault]:
    """A fault when what fresh memory holds changes the bits of the same call."""
    expected, got = case.evaluate(trial.subject, before), case.evaluate(trial.subject, after)
    if wrong := differing(expected, got, tuple(expected)):
        detail = spell_difference(expected[wrong[0]], got[wrong[0]])
        what = f"with {after.fresh} in fresh memory: unit {wrong[0]}: {detail}"
        yield Fault(what, case.recipe, wrong[0], before, after)


def _exact(trial: Trial) -> bool:
    return BATCH_INVARIANT in trial.subject.spec.features


def refuses(trial: Trial) -> Iterator[Fault]:
    """Dtypes and shapes that are not declared: an error, or the right result."""
    yield from _undeclared_dtypes(trial)
    yield from _mismatched_shapes(trial)


def _undeclared_dtypes(trial: Trial) -> Iterator[Fault]:
    declared = [dict(signature) for signature in trial.subject.spec.signatures]
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        dtypes = dict.fromkeys(trial.subject.dtypes, dtype)
        if dtypes in declared or trial.subject.spec.stored:
            continue
        subject = replace(trial.subject, dtypes=dtypes)
        recipe = replace(next(trial.work.recipes(trial.subject)), dtypes=dtypes)
        case = make_case(recipe)
        side = one_call(case.subjects)
        try:
            if isinstance(case, WriteCase):
                continue  # what a cache holds is judged by reading it, which needs a kernel for this dtype
            got = case.evaluate(subject, side)
        except _REFUSALS:
            continue
        reference = reference_subject(subject.spec.operator, dtypes, subject.spec.machine.device)
        expected = case.evaluate(reference, side)
        operator = subject.operator
        for unit in case.subjects:
            allowed = dict(operator.agreement)["float32" if dtype in ("float64", "float32") else dtype]
            if any(error(operator, a, b) > allowed for a, b in zip(got[unit], expected[unit], strict=False)):
                yield Fault(f"takes {dtype}, which it does not declare, and gets it wrong", recipe, unit, None, side)
                return


def _mismatched_shapes(trial: Trial) -> Iterator[Fault]:
    """One element more in the last axis of the activations than the weight has."""
    roles = {"gemm.linear": "x", "gemm.batched": "x", "norm.rms": "x", "norm.add_rms": "residual"}
    role = roles.get(trial.subject.spec.operator)
    if role is None:
        return
    recipe = next(trial.work.recipes(trial.subject))
    case = trial.case(recipe)
    arguments = case.arguments(trial.subject, one_call(case.subjects))
    x = arguments[role]
    arguments[role] = torch.cat((x, x[..., :1]), dim=-1)
    try:
        trial.subject.call(arguments)
    except _REFUSALS:
        return
    yield Fault(f"takes {role} of {list(arguments[role].shape)}, which does not fit, without an error", recipe)


def traits(trial: Trial) -> Iterator[Fault]:
    """Shapes that are declared by trait are tried at both ends; declared orders are compared with their definition."""
    spec = trial.subject.spec
    for fact in trial.subject.operator.facts:
        values = sorted(value for value in spec.traits.get(fact, ()) if isinstance(value, int))
        for size in dict.fromkeys((*values[:1], *values[-1:])):
            recipe = next(trial.work.recipes(trial.subject))
            if fact == "group_size":
                sizes = {**recipe.sizes, "Hq": size * recipe.sizes["Hkv"]}
            else:
                sizes = {**recipe.sizes, FACT_AXES[fact]: size}
            case = make_case(replace(recipe, sizes=sizes))
            for fault in _agrees(trial, case, one_call(case.subjects)):
                yield replace(fault, summary=f"declares {fact}={size}: {fault.summary}")
    for name, values_of in spec.traits.items():
        for value in sorted(map(str, values_of)):
            for probe in order_probes(spec.operator, name, value, trial.subject.dtypes):
                out = trial.subject.call(probe.placed(trial.subject))
                if not all(
                    torch.equal(as_bytes(a.to("cpu")), as_bytes(b)) for a, b in zip(out, probe.expected, strict=True)
                ):
                    detail = spell_difference(probe.expected, [a.to("cpu") for a in out])
                    yield Fault(f"declares {name}={value}: {probe.name}: {detail}")


def order(trial: Trial) -> Iterator[Fault]:
    """Every other kernel here with the same published order, on inputs that show another order."""
    for recipe in _one_each(trial) if trial.peers else ():
        case = trial.case(recipe)
        if isinstance(case, WriteCase):
            return  # the inside of a page is the kernel's own; attention over it is compared instead
        side = one_call(case.subjects, threads=1)
        got = case.evaluate(trial.subject, side)
        for peer in trial.peers:
            expected = case.evaluate(peer, side)
            if wrong := differing(expected, got, tuple(expected)):
                detail = spell_difference(expected[wrong[0]], got[wrong[0]])
                owner = f"{peer.spec.name} of {peer.spec.distribution}"
                yield Fault(f"claims the order {peer.spec.bit_order} of {owner}, and differs: {detail}", recipe)


def batch(trial: Trial) -> Iterator[Fault]:
    """Batches of every size, with every unit in other places and in loud company."""
    for recipe in _one_each(trial, (CANCEL, "plain", "equal")):
        case = trial.case(recipe)
        if isinstance(case, WriteCase):
            yield from _write_orders(trial, case)
            continue
        if isinstance(case, AttentionCase):
            yield from _chunkings(trial, case)
            continue
        yield from trial.same(case, one_call(case.subjects, threads=1), "all of them in one batch")
        for size in trial.work.batch_sizes:
            for turn, cycle in enumerate(_companies(case)):
                order = tuple(cycle[(at + size) % len(cycle)] for at in range(size))
                yield from trial.same(case, one_call(order, threads=1), f"in a batch of {size}")
                if turn == 0:
                    yield from trial.same(case, one_call(order[::-1], threads=1), f"in a batch of {size}, reversed")


def _companies(case: Case) -> list[list[int]]:
    """Cycles of units: the compared ones among themselves, and with loud neighbours between them."""
    mixed = [unit for pair in zip(case.subjects, case.neighbours, strict=False) for unit in pair]
    return [list(case.subjects), [*mixed, *case.subjects]]


def _chunkings(trial: Trial, case: AttentionCase) -> Iterator[Fault]:
    """Whole prefills, chunks, decode rows and mixtures of them, with and without loud company."""
    by_sequence = [[unit for unit in case.subjects if case.tokens[unit][0] == s] for s in range(len(case.lengths) - 1)]
    whole = tuple(case.subjects)
    decode = tuple(units[-1] for units in by_sequence)
    arrangements = {
        "whole prefills of all sequences": (whole,),
        "whole prefills, the last sequence first": (tuple(u for units in by_sequence[::-1] for u in units),),
        "whole prefills one after another": tuple(map(tuple, by_sequence)),
        "chunks of 3": tuple(tuple(units[at : at + 3]) for units in by_sequence for at in range(0, len(units), 3)),
        "chunks that end inside a page": tuple(
            tuple(part) for units in by_sequence for part in (units[:7], units[7:]) if part
        ),
        "decode rows together": (decode,),
        "decode rows beside a loud prefill": ((*case.neighbours, *decode),),
        "a prefill between loud decode rows": ((case.neighbours[-1], *by_sequence[-1], case.neighbours[3]),),
        "many decode rows": (decode * 13,),
    }
    for what, calls in arrangements.items():
        yield from trial.same(case, Side(calls, threads=1), what)


def _write_orders(trial: Trial, case: WriteCase) -> Iterator[Fault]:
    everything = (*case.subjects, *case.neighbours)
    shuffled = torch.randperm(len(everything), generator=torch.Generator().manual_seed(7)).tolist()
    half = len(everything) // 2
    for what, calls in {
        "all tokens at once": (everything,),
        "all tokens at once, shuffled": (tuple(shuffled),),
        "in two calls": (everything[:half], everything[half:]),
        "in two calls, shuffled": (tuple(shuffled[:half]), tuple(shuffled[half:])),
        "written twice": (everything, tuple(shuffled)),
    }.items():
        yield from trial.same(case, Side(calls, threads=1), what)
        yield from trial.same(case, Side(calls, threads=1, padding=3), f"{what}, with tokens that go nowhere")


def layout(trial: Trial) -> Iterator[Fault]:
    """Unaligned and strided arguments; other pages, garbage past the context, rows without a sequence."""
    for recipe in _one_each(trial):
        case = trial.case(recipe)
        units = tuple(case.subjects)
        everything = (*units, *case.neighbours)
        calls = (everything,) if trial.writes_cache else (units,)
        few = units if trial.subject.is_paged else units[:FEW]
        for where in ("offset", "strided"):
            yield from trial.same(case, Side(calls, layout=where, threads=1), f"{where} arguments")
            if not trial.writes_cache:
                yield from trial.same(case, replace(each_alone(few), layout=where, threads=1), f"{where}, one by one")
        if isinstance(case, AttentionCase):
            for seed in (1, 2, 3):
                yield from trial.same(case, Side(calls, pages=seed, threads=1), "pages in another order")
            for filler in (float("nan"), LOUD, -LOUD):
                yield from trial.same(case, Side(calls, filler=filler, threads=1), f"{filler} in unwritten slots")
            yield from trial.same(case, Side(calls, padding=5, threads=1), "rows that belong to no sequence")


def history(trial: Trial) -> Iterator[Fault]:
    """Another batch first on freshly packed weights, many calls, and the very first result once more."""
    for recipe in _one_each(trial):
        case = trial.case(recipe)
        units = tuple(case.subjects)
        everything = (*units, *case.neighbours)
        if trial.writes_cache:
            yield from trial.same(case, Side((everything,) * 3, threads=1), "written three times")
            yield from trial.same(case, trial.plain(case), "again")
            continue
        many = everything if trial.subject.is_paged or len(units) > SUBJECTS else everything * 6
        befores = {"a large batch": (many,), "one row": (units[:1],), "many calls": (units[:SUBJECTS],) * 40}
        for what, before in [*befores.items()][: 1 if trial.work.few else None]:
            calls = (*before, *trial.plain(case, FEW).calls)
            yield from trial.same(case, Side(calls, threads=1), f"after {what}")
        yield from trial.same(case, one_call(units, threads=1), "all together, later")
    recipe, first = trial.first_results()
    case = trial.case(recipe)
    later = case.evaluate(trial.subject, trial.plain(case, FEW))
    if wrong := differing(first, later, tuple(first)):
        detail = spell_difference(first[wrong[0]], later[wrong[0]])
        yield Fault(f"the first calls of all gave other bits than later ones: unit {wrong[0]}: {detail}", recipe)


def threads(trial: Trial) -> Iterator[Fault]:
    """Whole batches on 1, 2, 3 and 4 threads."""
    for recipe in _one_each(trial):
        case = trial.case(recipe)
        units = (*case.subjects, *case.neighbours) if trial.writes_cache else case.subjects
        many = tuple(units) * (1 if trial.subject.is_paged or len(units) > SUBJECTS else 9)
        whole, one = Side((many,), threads=1), Side((tuple(units[:1]),), threads=1)
        for side in (whole,) if trial.writes_cache or trial.work.few else (whole, one):
            expected = case.evaluate(trial.subject, side)
            for count in (2,) if trial.work.few else (2, 3, 4):
                other = replace(side, threads=count)
                got = case.evaluate(trial.subject, other)
                if wrong := differing(expected, got, trial.compared(case, side)):
                    detail = spell_difference(expected[wrong[0]], got[wrong[0]])
                    yield Fault(f"on {count} threads: unit {wrong[0]}: {detail}", recipe, wrong[0], side, other)
                    return


def _one_each(trial: Trial, characters: Sequence[str] = (CANCEL,)) -> Iterator[Recipe]:
    """Recipes for the checks of bits."""
    return trial.work.recipes(trial.subject, characters)


CHECKERS: Mapping[str, Checker] = {
    "agreement": agreement,
    "accumulation": accumulation,
    "empty": empty,
    "writes": writes,
    "initialised": initialised,
    "refuses": refuses,
    "traits": traits,
    "order": order,
    "batch": batch,
    "layout": layout,
    "history": history,
    "threads": threads,
}
"""How each check of `names.CHECKS` is done; `import` is done by whoever makes the `Subject`."""


def first_fault(check: str, trial: Trial) -> Fault | None:
    """The first fault that a check finds; what a kernel raises is one, too."""
    with circumstances(threads=1), torch.inference_mode():
        try:
            if BATCH_INVARIANT in trial.subject.spec.features:
                trial.first_results()
            return next(iter(CHECKERS[check](trial)), None)
        except Exception as error:  # a kernel may raise anything
            return Fault(f"{type(error).__name__}: {error}")
