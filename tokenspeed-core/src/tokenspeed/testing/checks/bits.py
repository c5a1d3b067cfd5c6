"""The bits of a kernel: a function of the unit alone, whatever the batch, the memory, the past and the threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tokenspeed.testing.cases import Case, Side, each_alone, one_call
from tokenspeed.testing.compare import first_difference
from tokenspeed.testing.inputs import CANCEL, LOUD, SUBJECTS
from tokenspeed.testing.paged import AttentionCase, WriteCase
from tokenspeed.testing.trial import FEW, Fault, Trial


def batch(trial: Trial) -> Iterator[Fault]:
    """Batches of every size, with every unit in other places and in loud company."""
    for recipe in trial.recipes((CANCEL, "plain", "equal")):
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
    for recipe in trial.recipes():
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
    for recipe in trial.recipes():
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
    if found := first_difference(first, later, tuple(first)):
        unit, detail = found
        yield Fault(f"the first calls of all gave other bits than later ones: unit {unit}: {detail}", recipe)


def threads(trial: Trial) -> Iterator[Fault]:
    """Whole batches on 1, 2, 3 and 4 threads, and on 1 again."""
    for recipe in trial.recipes():
        case = trial.case(recipe)
        units = (*case.subjects, *case.neighbours) if trial.writes_cache else case.subjects
        many = tuple(units) * (1 if trial.subject.is_paged or len(units) > SUBJECTS else 9)
        whole, one = Side((many,), threads=1), Side((tuple(units[:1]),), threads=1)
        for side in (whole,) if trial.writes_cache or trial.work.few else (whole, one):
            expected = case.evaluate(trial.subject, side)
            for count in (2,) if trial.work.few else (1, 2, 3, 4):
                other = replace(side, threads=count)
                got = case.evaluate(trial.subject, other)
                if found := first_difference(expected, got, trial.compared(case, side)):
                    unit, detail = found
                    summary = f"on {count} thread{'s' * (count > 1)}: unit {unit}: {detail}"
                    yield Fault(summary, recipe, unit, side, other)
                    return
