"""A condition under which requests run, as data: sizes of the engine, who arrives, is cancelled or preempted, and when.

Being data, a condition can be run again: for its replies, and once more with every operator watched. Steps of the
engine are the clock, so a script does the same thing each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.scheduler import Schedule
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.verify.items import Collector, Item, Outcome

LARGE_STEP = 256
"""Tokens in a step above which kernels are known to change their ways."""


@dataclass(frozen=True)
class Setup:
    """Sizes and circumstances of the engine. `pages` None: as many as the script can use. `threads` None: as started.

    `dirty_pages` fills the KV pages with large numbers first, `dirty_memory` every fresh tensor with NaN; neither may
    show in a reply. `ties` makes every even token id and the odd one after it equally likely. Decode steps that fit
    one of the `bucket_rows` run padded to it, as recorded steps.
    """

    max_seqs: int = 256
    budget: int = 4096
    max_chunk: int | None = None
    pages: int | None = None
    prefix_caching: bool = True
    threads: int | None = None
    dirty_pages: bool = False
    dirty_memory: bool = False
    ties: bool = False
    bucket_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Start:
    """`item` arrives before step `at`; `compared` unless it is only a neighbour."""

    item: Item
    at: int = 0
    compared: bool = True


@dataclass(frozen=True)
class Cancel:
    """The start number `index` is cancelled before step `at`."""

    index: int
    at: int


@dataclass(frozen=True)
class Preempt:
    """The start number `index`, and all that arrived after it, lose their pages before step `at`."""

    index: int
    at: int


@dataclass(frozen=True)
class Script:
    """Starts are known by their number. `before` run one after another first, on the same engine."""

    starts: tuple[Start, ...]
    setup: Setup = field(default_factory=Setup)
    cancels: tuple[Cancel, ...] = ()
    preempts: tuple[Preempt, ...] = ()
    before: tuple[Item, ...] = ()

    def items(self) -> list[Item]:
        """Everything that runs."""
        return [*self.before, *(start.item for start in self.starts)]


def together(items: Iterable[Item], **setup: object) -> Script:
    """All at once."""
    return Script(tuple(Start(item) for item in items), Setup(**setup))  # type: ignore[arg-type]


def alone(item: Item) -> Script:
    """One item on an idle engine that has seen nothing."""
    return together([item])


@dataclass(frozen=True)
class Run:
    """Outcomes by number of the start, and what happened: counters by name, and every batch size that occurred."""

    outcomes: tuple[Outcome, ...]
    evidence: Counter[str]
    batch_sizes: frozenset[int]


class Watch:
    """An observer that counts what a scenario must prove."""

    def __init__(self) -> None:
        self.evidence: Counter[str] = Counter()
        self.batch_sizes: set[int] = set()

    def step(self, schedule: Schedule, batch: ForwardBatch) -> None:
        """Count the kind of this step."""
        size = len(schedule.decodes) + len(schedule.chunks)
        self.batch_sizes.add(size)
        self.evidence["steps"] += 1
        self.evidence["shared steps"] += size > 1
        self.evidence["padded steps"] += len(batch.context_lens) > size
        self.evidence["steps of decode and prefill"] += bool(schedule.decodes and schedule.chunks)
        self.evidence["steps above 256 tokens"] += len(batch.token_ids) > LARGE_STEP
        for state in (*schedule.decodes, *schedule.chunks):
            if any(abs(b - a) != 1 for a, b in zip(state.pages, state.pages[1:], strict=False)):
                self.evidence["scattered page tables"] += 1

    def logits(self, rows: object) -> None:
        """Nothing to count."""


def drive(engine: Engine, script: Script, label: str = "v") -> tuple[Outcome, ...]:
    """Run a script on an engine and return the outcomes by number of the start; a cancelled one keeps what it has."""
    for number, item in enumerate(script.before):
        _drive(engine, (Start(item),), (), (), f"{label}-before-{number}")
    return _drive(engine, script.starts, script.cancels, script.preempts, label)


def request_id(label: str, index: int) -> str:
    """The engine's id of a start."""
    return f"{label}-{index}"


def _drive(
    engine: Engine,
    starts: tuple[Start, ...],
    cancels: tuple[Cancel, ...],
    preempts: tuple[Preempt, ...],
    label: str,
) -> tuple[Outcome, ...]:
    collectors = {request_id(label, index): Collector() for index in range(len(starts))}
    due = sorted([(start.at, index) for index, start in enumerate(starts)])
    step = 0
    while due or engine.has_work:
        if not engine.has_work:
            step = max(step, due[0][0])
        while due and due[0][0] <= step:
            _, index = due.pop(0)
            engine.add(starts[index].item.request(request_id(label, index)))
        for cancel in cancels:
            if cancel.at == step and (update := engine.abort(request_id(label, cancel.index))) is not None:
                collectors[update.id].add(update)
        for preempt in preempts:
            if preempt.at == step:
                engine.preempt([request_id(label, preempt.index)])
        for update in engine.step():
            collectors[update.id].add(update)
        step += 1
    return tuple(collector.outcome() for collector in collectors.values())


def pages_needed(script: Script) -> int:
    """Pages that hold everything that a script computes at the same time, and some to spare."""
    sizes = [len(item.prompt) + (item.params.max_tokens or 0) for item in script.items()]
    return sum(-(-size // PAGE_SIZE) + 2 for size in sizes) + 4
