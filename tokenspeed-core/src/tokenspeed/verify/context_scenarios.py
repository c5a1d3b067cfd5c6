"""Scenarios of one context: in which pieces it is computed, from where it comes, and whether it is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.verify.items import make_item
from tokenspeed.verify.scenario import Check, Stage, Trial
from tokenspeed.verify.script import Cancel, Preempt, Script, Setup, Start, alone, together


def chunks(stage: Stage) -> Iterator[Trial]:
    """Chunks of every length, and budgets that cut where neighbours leave room."""
    items = [item for item in stage.items if len(item.prompt) > 1][:16]
    for chunk in stage.work.chunks:
        yield stage.against_alone(together(items, max_chunk=chunk, prefix_caching=False))
    yield stage.against_alone(together([stage.long], max_chunk=200, prefix_caching=False))
    # A small budget makes the neighbours' tokens decide where a prefill is cut.
    for budget in (37, 64):
        starts = tuple(Start(item, at=2 * i) for i, item in enumerate(items))
        yield stage.against_alone(Script(starts, Setup(budget=budget, max_seqs=8, prefix_caching=False)))


def prefix(stage: Stage) -> Iterator[Trial]:
    """Prefixes around page boundaries, prompts that are being computed, and the same pages in other orders."""
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


def preemption(stage: Stage) -> Iterator[Trial]:
    """Preempted at will and for want of pages, with and without a prefix cache."""
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


def prefill(stage: Stage) -> Iterator[Trial]:
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
