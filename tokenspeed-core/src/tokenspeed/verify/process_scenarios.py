"""Scenarios of the process: what lies in memory, padded and recorded steps, threads, and what was served before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tokenspeed.verify.items import make_item
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.scenario import Check, Stage, Trial
from tokenspeed.verify.script import Cancel, Script, Setup, Start, alone, together


def memory(stage: Stage) -> Iterator[Trial]:
    """Dirt in free pages and in fresh memory, and page tables with holes."""
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


def buckets(stage: Stage) -> Iterator[Trial]:
    """Few rows right after many, so that what a bucket held before lies in the rows that are nobody's."""
    rows = (2, 8, 16)
    for size in (16, 5, 8, 3):
        chosen = [stage.short[i % len(stage.short)] for i in range(size)]
        yield stage.against_alone(together(chosen, bucket_rows=rows, max_seqs=16), {"full buckets": size in rows})
    starts = tuple(Start(item, at=2 * i) for i, item in enumerate(stage.items[:9]))
    setup = Setup(bucket_rows=rows, max_seqs=16, dirty_pages=True, dirty_memory=True)
    yield stage.against_alone(Script(starts, setup), {"dirty memory": 1})


def threads(stage: Stage) -> Iterator[Trial]:
    """Every number of threads, for batches and for contexts that are long enough to be shared among threads."""
    for number in thread_numbers(stage.lab):
        for items in (stage.items[:8], stage.items[4:5], [stage.long], [stage.long, *stage.items[:8]]):
            other = int(number != stage.lab.threads)
            yield stage.against_alone(together(items, threads=number), {"other numbers of threads": other})


def thread_numbers(lab: Lab) -> list[int]:
    """The numbers of threads that are compared: one, two, and what the engine would use here."""
    return sorted({1, 2, lab.config.threads or lab.plan.machine.cores})


def later(stage: Stage) -> Iterator[Trial]:
    """The first request after the start, again after others, and on an engine that has served many."""
    first = stage.items[0]
    assert stage.lab.boot is not None
    boot = stage.lab.boot
    again = stage.lab.run(alone(first)).outcomes[0]
    script = Script((Start(first),), before=tuple([*stage.short, first] * stage.work.repeats))
    on_used_engine = stage.lab.run(script)
    checks = [
        Check(first, boot, again, alone(first), alone(first)),
        Check(first, boot, on_used_engine.outcomes[0], alone(first), script),
    ]
    yield Trial(checks, on_used_engine.evidence + Counter({"requests in between": len(script.before)}))
