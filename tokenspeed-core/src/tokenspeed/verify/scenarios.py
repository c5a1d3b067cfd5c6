"""The equalities that must hold, as a table: name, statement, what must be proved to have happened, and how to test it.

A scenario yields trials. A trial compares replies, which were computed under some condition, with what they must be,
usually the reply to the same request alone. The counters of all its trials are added up; a scenario that cannot show
its mechanism at work fails as vacuous, whatever it compared.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from tokenspeed.engine.seeds import sample_seeds
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.layers.embedding import Embedding
from tokenspeed.verify.items import Item, Outcome, make_item, make_items
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Cancel, Preempt, Script, Setup, Start, alone, together

BATCH_SIZES = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128)
"""Sizes at which kernels of other engines were seen to change their ways."""

PREFIX_LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)
"""Shared prefixes around the sizes of a page, of four, of eight and of sixteen."""


@dataclass(frozen=True)
class Work:
    """How much a run does. `items` prompts of `output_tokens` tokens are compared in most scenarios."""

    name: str
    items: int
    output_tokens: int
    batch_tokens: int
    repeats: int
    chunks: tuple[int, ...]
    prefixes: tuple[int, ...] = PREFIX_LENGTHS
    long_tokens: int = 136


QUICK = Work("quick", 14, 20, 6, 2, (1, 16, 33), long_tokens=132)
FULL = Work("full", 112, 128, 16, 5, (1, 3, 7, 16, 17, 33, 64, 100))
WORKS = {work.name: work for work in (QUICK, FULL)}


@dataclass(frozen=True)
class Check:
    """`got` must be `expected`. The scripts (and the number of the start) compute each of them again.

    `blame` names the culprit where running the two again and comparing their operators cannot.
    """

    item: Item
    expected: Outcome
    got: Outcome
    reference: Script | None = None
    tested: Script | None = None
    index: int = 0
    blame: str = ""


@dataclass(frozen=True)
class Trial:
    """Some checks and what was seen to happen meanwhile."""

    checks: Sequence[Check]
    evidence: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Scenario:
    """`proof` names counters that must reach at least these values over all trials."""

    name: str
    states: str
    proof: Mapping[str, int]
    run: Callable[[Stage], Iterator[Trial]]


class Stage:
    """A lab with the items that scenarios share."""

    def __init__(self, lab: Lab, work: Work) -> None:
        self.lab = lab
        self.work = work

    @cached_property
    def items(self) -> list[Item]:
        """Ragged prompts under every way of sampling."""
        return make_items(
            self.work.items,
            vocab_size=self.lab.vocab_size,
            longest=self.lab.longest,
            output_tokens=self.work.output_tokens,
        )

    @cached_property
    def short(self) -> list[Item]:
        """Items with short outputs, to fill large batches."""
        return make_items(24, vocab_size=self.lab.vocab_size, longest=128, output_tokens=self.work.batch_tokens, seed=2)

    @cached_property
    def long(self) -> Item:
        """A context long enough that threads share it when it is alone, and not when it has company."""
        length = min(self.lab.longest - 24, 950)
        return make_item("long context", self.tokens(length, 950), 950, 12, temperature=1.0)

    def tokens(self, count: int, seed: int) -> list[int]:
        """Random token ids."""
        source = random.Random(seed)
        return [source.randrange(self.lab.vocab_size) for _ in range(count)]

    def against_alone(
        self, script: Script, evidence: Mapping[str, int] = MappingProxyType({}), blame: str = ""
    ) -> Trial:
        """Run a script and compare each compared start with the same request alone; `evidence` is counted as well."""
        run = self.lab.run(script)
        seen = run.evidence + Counter(evidence)
        checks = [
            Check(start.item, self.lab.alone(start.item), outcome, _alone(start.item, script), script, index, blame)
            for index, (start, outcome) in enumerate(zip(script.starts, run.outcomes, strict=True))
            if start.compared
        ]
        seen.update({f"batch of {size}": 1 for size in run.batch_sizes})
        return Trial(checks, seen)


def _alone(item: Item, script: Script) -> Script:
    """The reference of an item: alone, under the same model."""
    return replace(alone(item), setup=Setup(ties=script.setup.ties))


def _batch(stage: Stage) -> Iterator[Trial]:
    yield stage.against_alone(together(stage.items))
    for size in BATCH_SIZES:
        chosen = [stage.short[i % len(stage.short)] for i in range(size)]
        yield stage.against_alone(together(chosen, prefix_caching=False))


def _repeat(stage: Stage) -> Iterator[Trial]:
    prompts = [make_item(f"same length {i}", stage.tokens(40, 100 + i), i, stage.work.batch_tokens) for i in range(48)]
    for _ in range(stage.work.repeats):
        yield stage.against_alone(together(prompts), {"rounds": 1})


def _order(stage: Stage) -> Iterator[Trial]:
    items = stage.items[:16]
    yield stage.against_alone(together(reversed(items)), {"orders": 1})
    yield stage.against_alone(Script(tuple(Start(item, at=3 * i) for i, item in enumerate(items))), {"orders": 1})
    source = random.Random(3)
    for _ in range(stage.work.repeats):
        shuffled = source.sample(items, len(items))
        starts = tuple(Start(item, at=source.randrange(30)) for item in shuffled)
        yield stage.against_alone(Script(starts, Setup(max_seqs=5)), {"orders": 1})


def _neighbours(stage: Stage) -> Iterator[Trial]:
    lab, long = stage.lab, min(stage.lab.longest - 16, 700)
    target = make_item("target", stage.tokens(70, 7), 7, stage.work.long_tokens, temperature=1.0)
    greedy = make_item("greedy target", stage.tokens(33, 8), 8, stage.work.long_tokens, temperature=0.0)
    loudest = loud_tokens(lab)
    company = {
        "long": make_item("long", stage.tokens(long, 9), 9, 8),
        "one token repeated": make_item("repeated", [stage.tokens(1, 10)[0]] * min(long, 512), 10, 8),
        "loud": make_item("loud", [loudest[i % len(loudest)] for i in range(min(long, 300))], 11, 40),
        "the same request": target,
        "another seed": target.but("other seed", seed=99),
        "unseeded": target.but("unseeded", seed=sample_seeds(None, 1)[0]),
        "the same with more": target.but("more", prompt=[*target.prompt, *stage.tokens(50, 12)]),
    }
    for name, neighbour in company.items():
        starts = (
            Start(target),
            Start(neighbour, at=0, compared=False),
            Start(greedy, at=1),
            Start(neighbour, at=64, compared=False),
        )
        yield stage.against_alone(Script(starts), {f"neighbours: {name}": 1})
    sharer = target.but("sharer", prompt=[*target.prompt, *stage.tokens(60, 13)], max_tokens=60)
    for at in (1, 15, 19):
        sharers = (Start(sharer, compared=False), Start(sharer.but("sharer 2", seed=3), compared=False))
        # The intruders take every page that the cancelled ones gave back, and must not get one that is still in use.
        intruders = (Start(make_item(f"intruder {i}", stage.tokens(150, 14 + i), i, 12), at=at + 5) for i in range(2))
        script = Script((*sharers, Start(target, at=2), *intruders), cancels=(Cancel(0, at), Cancel(1, at + 4)))
        yield stage.against_alone(script)
        yield stage.against_alone(replace(script, setup=Setup(pages=26)))


def loud_tokens(lab: Lab) -> list[int]:
    """The token ids with the largest embeddings, the loudest first."""
    for module in lab.model.modules():
        if isinstance(module, Embedding):
            with torch.inference_mode():
                parts = torch.split(torch.arange(lab.vocab_size), 4096)
                rows = [module(ids).float().norm(dim=-1) for ids in parts]
            return torch.cat(rows).topk(min(64, lab.vocab_size)).indices.tolist()
    return list(range(min(64, lab.vocab_size)))


def _chunks(stage: Stage) -> Iterator[Trial]:
    items = [item for item in stage.items if len(item.prompt) > 1][:16]
    for chunk in stage.work.chunks:
        yield stage.against_alone(together(items, max_chunk=chunk, prefix_caching=False))
    yield stage.against_alone(together([stage.long], max_chunk=200, prefix_caching=False))
    # A small budget makes the neighbours' tokens decide where a prefill is cut.
    for budget in (37, 64):
        starts = tuple(Start(item, at=2 * i) for i, item in enumerate(items))
        yield stage.against_alone(Script(starts, Setup(budget=budget, max_seqs=8, prefix_caching=False)))


def _prefix(stage: Stage) -> Iterator[Trial]:
    room = stage.lab.longest - stage.work.output_tokens - 8
    for length in stage.work.prefixes:
        if length > room:
            continue
        shared = stage.tokens(length, 200 + length)
        warm = make_item(f"warm {length}", [*shared, *stage.tokens(5, 1)], 1, 2)
        kind = {"temperature": 0.0} if length % 2 else {"temperature": 1.0}
        item = make_item(f"prefix {length}", [*shared, *stage.tokens(3, 2)], length, stage.work.output_tokens, **kind)
        # Twice: the second finds the whole prompt of the first, its own reply included.
        script = Script((Start(item), Start(item, at=4)), before=(warm, item))
        trial = stage.against_alone(script)
        whole_pages = len(item.prompt) // PAGE_SIZE
        hit = all(check.got.cached_tokens >= (whole_pages - 1) * PAGE_SIZE for check in trial.checks)
        trial.evidence["prefix lengths"] += 1
        trial.evidence["hits as long as expected"] += hit
        yield trial
    # Whoever arrives while a prompt is being computed may use its finished pages only.
    prompt = stage.tokens(min(room, 150), 260)
    sharers = [make_item(f"sharer {i}", [*prompt, i], i, 4) for i in range(6)]
    starts = tuple(Start(item, at=i) for i, item in enumerate(sharers))
    yield stage.against_alone(Script(starts, Setup(max_chunk=24)), {"arrivals during a prefill": 5})
    for at in (1, 2, 3):
        starts = (Start(sharers[0], compared=False), Start(sharers[1], at=at))
        yield stage.against_alone(Script(starts, Setup(max_chunk=24), cancels=(Cancel(0, at),)))
    # The same pages after other pages: what a page holds depends on everything before it.
    first, second, third = (stage.tokens(PAGE_SIZE, 250 + i) for i in range(3))
    orders = [[*first, *second], [*second, *first], [*third, *second], [*first, *first], [*second, *second, *first]]
    items = [make_item(f"pages in order {i}", [*pages, 1, 2], i, 6) for i, pages in enumerate(orders)]
    for number in range(len(items)):
        script = Script((Start(items[number]),), before=tuple(items[:number] + items[number + 1 :]))
        yield stage.against_alone(script, {"other orders of the same pages": 1})


def _preemption(stage: Stage) -> Iterator[Trial]:
    items = stage.items[:8]
    long = [
        make_item(f"pressed {i}", stage.tokens(20 + i, 300 + i), i, min(stage.work.long_tokens, 100), temperature=i % 2)
        for i in range(6)
    ]
    # Greedy and heavily penalised: every token that was generated before matters.
    penalties = {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.5}
    long.append(make_item("pressed and penalised", stage.tokens(9, 350), 350, 60, **penalties))
    for caching in (True, False):
        preempts = tuple(Preempt(index, at) for at, index in ((1, 0), (3, 2), (9, 5), (17, 0)))
        yield stage.against_alone(
            replace(together(items, prefix_caching=caching), preempts=preempts), {"forced preemptions": 1}
        )
        trial = stage.against_alone(together(long, pages=18, prefix_caching=caching))
        trial.evidence["preempted for want of pages"] += trial.evidence["preemptions"]
        yield trial


def _prefill(stage: Stage) -> Iterator[Trial]:
    """Prompt logprobs of prompt + reply, in several chunkings and in company, are the reply's own logprobs."""
    for chunk in (None, 17):
        scored, expected = [], []
        for item in stage.items:
            outcome = stage.lab.alone(item)
            prompt = [*item.prompt, *outcome.token_ids]
            scored.append(item.but(f"score {item.name}", prompt=prompt, max_tokens=0, prompt_logprobs=0))
            expected.append((item, outcome))
        script = together(scored, max_chunk=chunk)
        run = stage.lab.run(script)
        checks = []
        for index, ((item, outcome), found) in enumerate(zip(expected, run.outcomes, strict=True)):
            got = replace(outcome, bits=found.prompt_bits[len(item.prompt) - 1 :])
            checks.append(Check(item, outcome, got, alone(item), script, index))
        seen = run.evidence + Counter({"teacher-forced tokens": sum(len(outcome.bits) for _, outcome in expected)})
        yield Trial(checks, seen)


def _later(stage: Stage) -> Iterator[Trial]:
    first = stage.items[0]
    assert stage.lab.boot is not None
    boot = stage.lab.boot
    later = stage.lab.run(alone(first)).outcomes[0]
    script = Script((Start(first),), before=tuple([*stage.short, first] * stage.work.repeats))
    on_used_engine = stage.lab.run(script)
    checks = [
        Check(first, boot, later, alone(first), alone(first)),
        Check(first, boot, on_used_engine.outcomes[0], alone(first), script),
    ]
    yield Trial(checks, on_used_engine.evidence + Counter({"requests in between": len(script.before)}))


def _buckets(stage: Stage) -> Iterator[Trial]:
    """Few rows right after many, so that what a bucket held before lies in the rows that are nobody's."""
    rows = (2, 8, 16)
    for size in (16, 5, 8, 3):
        chosen = [stage.short[i % len(stage.short)] for i in range(size)]
        yield stage.against_alone(together(chosen, bucket_rows=rows, max_seqs=16), {"full buckets": size in rows})
    starts = tuple(Start(item, at=2 * i) for i, item in enumerate(stage.items[:9]))
    setup = Setup(bucket_rows=rows, max_seqs=16, dirty_pages=True, dirty_memory=True)
    yield stage.against_alone(Script(starts, setup), {"dirty memory": 1})


def _threads(stage: Stage) -> Iterator[Trial]:
    for threads in thread_numbers(stage.lab):
        for items in (stage.items[:8], stage.items[4:5], [stage.long], [stage.long, *stage.items[:8]]):
            other = int(threads != stage.lab.threads)
            yield stage.against_alone(together(items, threads=threads), {"other numbers of threads": other})


def thread_numbers(lab: Lab) -> list[int]:
    """The numbers of threads that are compared: one, two, and what the engine would use here."""
    return sorted({1, 2, lab.config.threads or lab.plan.machine.cores})


def _memory(stage: Stage) -> Iterator[Trial]:
    items = stage.items[:12]
    yield stage.against_alone(together(items, dirty_pages=True), {"dirty pages": 1})
    yield stage.against_alone(together(items, dirty_pages=True, max_chunk=13), {"dirty pages": 1})
    for group in (items, items[:1], items[1:2], items[2:3]):
        # What such a kernel read lies in freed memory afterwards, so the reference is not what it was before.
        blame = "some kernel reads fresh memory that nothing has written to"
        yield stage.against_alone(together(group, dirty_memory=True), {"dirty memory": 1}, blame)
    # Cancelled requests of different lengths leave holes in the pool, which later page tables are made of.
    holes = [make_item(f"hole {i}", stage.tokens(16 * (1 + i % 4), 400 + i), i, 30) for i in range(12)]
    starts = (*(Start(item, compared=False) for item in holes), *(Start(item, at=6) for item in items))
    cancels = tuple(Cancel(i, 2 + i % 3) for i in range(0, 12, 2))
    yield stage.against_alone(Script(starts, Setup(prefix_caching=False), cancels=cancels))


def _samples(stage: Stage) -> Iterator[Trial]:
    """n samples are n requests with derived seeds: in one batch, and each alone."""
    group = make_item("group", stage.tokens(37, 500), 20260101, stage.work.output_tokens, temperature=1.0)
    for seed in (0, 20260101, -5, (1 << 62) + 3):
        members = [group.but(f"sample {i} of {seed}", seed=own) for i, own in enumerate(sample_seeds(seed, 6))]
        trial = stage.against_alone(together([*members, *stage.short[:3]]))
        replies = {check.got.token_ids for check in trial.checks[: len(members)]}
        trial.evidence["different samples"] += len(replies)
        yield trial


def _ties(stage: Stage) -> Iterator[Trial]:
    """Exact ties go to the lowest id: the even one of each pair; top_k=1 is greedy."""
    lab = stage.lab
    blame = f"sampling.sample by {', '.join(lab.kernels('sampling.sample'))}: not the lowest of equally likely ids"
    # Penalties would part the two tokens of a pair.
    flat: dict[str, Any] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    tied = [item.but(f"tied {item.name}", temperature=0.0, **flat) for item in stage.short[:12]]
    filtered = [item.but(f"top-1 of {item.name}", temperature=1.0, top_k=1) for item in tied]
    for items in (tied[:1], tied[:8], [*tied, *filtered], [*tied, *filtered] * 3):
        script = together(items, ties=True)
        run = lab.run(script)
        checks, count = [], 0
        for index, (item, outcome) in enumerate(zip(items, run.outcomes, strict=True)):
            reference = replace(alone(item.but(item.name, temperature=0.0, top_k=0)), setup=Setup(ties=True))
            expected = _once(lab, reference)
            lowest = replace(expected, token_ids=tuple(token & ~1 for token in expected.token_ids))
            checks.append(Check(item, lowest, outcome, reference, script, index, blame))
            count += len(outcome.token_ids)
        yield Trial(checks, run.evidence + Counter({"exact ties": count}))
    plain = [item.but(f"greedy {item.name}", temperature=0.0) for item in stage.items[:10]]
    top_one = [item.but(f"top-1 {item.name}", temperature=1.0, top_k=1) for item in plain]
    script = together([*plain, *top_one])
    run = lab.run(script)
    yield Trial(
        [
            Check(item, lab.alone(greedy), outcome, blame=blame)
            for greedy, item, outcome in zip(plain, top_one, run.outcomes[len(plain) :], strict=True)
        ],
        Counter({"top-1 requests": len(top_one)}),
    )


def _once(lab: Lab, script: Script) -> Outcome:
    return lab.run(script).outcomes[0]


def _table(*scenarios: Scenario) -> Mapping[str, Scenario]:
    return MappingProxyType({scenario.name: scenario for scenario in scenarios})


SCENARIOS: Mapping[str, Scenario] = _table(
    Scenario(
        "batch",
        "alone = in a batch of any size",
        {"steps above 256 tokens": 1, **{f"batch of {size}": 1 for size in BATCH_SIZES}},
        _batch,
    ),
    Scenario("repeat", "48 prompts of one length = the same again", {"shared steps": 1, "rounds": 2}, _repeat),
    Scenario(
        "order",
        "any order of arrival",
        {"shared steps": 1, "orders": 3, "steps of decode and prefill": 1},
        _order,
    ),
    Scenario(
        "neighbours",
        "any neighbours: long, loud, repetitive, cancelled, seeded or not",
        {"steps of decode and prefill": 1, "cancelled": 6, "cached tokens": 1, "neighbours: loud": 1},
        _neighbours,
    ),
    Scenario(
        "chunks",
        "whole prefill = chunks, wherever neighbours move the cut",
        {"chunked prefills": 10, "steps of decode and prefill": 1},
        _chunks,
    ),
    Scenario(
        "prefix",
        "cold = prefix from the cache",
        {
            "cached tokens": 1,
            "prefix lengths": 7,
            "hits as long as expected": 7,
            "other orders of the same pages": 5,
            "arrivals during a prefill": 5,
            "cancelled": 3,
        },
        _prefix,
    ),
    Scenario(
        "preemption",
        "uninterrupted = preempted and recomputed",
        {"preemptions": 4, "preempted for want of pages": 1},
        _preemption,
    ),
    Scenario(
        "prefill",
        "decode = prefill = score = prompt logprobs",
        {"teacher-forced tokens": 50, "chunked prefills": 1},
        _prefill,
    ),
    Scenario("samples", "n samples = n requests with the derived seeds", {"different samples": 8}, _samples),
    Scenario("ties", "exact ties go to the lowest id; top-1 = greedy", {"exact ties": 50, "top-1 requests": 8}, _ties),
    Scenario(
        "memory",
        "whatever lies in free pages, in fresh memory or where pages lie",
        {"dirty pages": 2, "dirty memory": 2, "scattered page tables": 1, "cancelled": 3},
        _memory,
    ),
    Scenario(
        "buckets",
        "decode steps as they come = padded and recorded ones (on a GPU, CUDA graphs)",
        {"padded steps": 10, "recorded steps": 20, "full buckets": 1, "dirty memory": 1},
        _buckets,
    ),
    Scenario("threads", "one thread = several", {"other numbers of threads": 1}, _threads),
    Scenario("later", "first request after the start = a later one", {"requests in between": 10}, _later),
)
"""Scenarios for an engine in this process, in the order in which they run."""
