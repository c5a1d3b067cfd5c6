"""The equalities that can be tested over HTTP, against any server or against one of our own in another process.

`expected` is what a reply must be: what the engine in this process computes, where there is one, or else what the
server itself says to the same request alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

from tokenspeed.engine.seeds import sample_seeds
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.verify import abilities
from tokenspeed.verify.abilities import Abilities
from tokenspeed.verify.endpoint import Endpoint
from tokenspeed.verify.items import Item, Outcome, make_item, make_items
from tokenspeed.verify.scenario import PREFIX_LENGTHS, Check, Trial, Work

Expected = Callable[[Item], Outcome]


@dataclass(frozen=True)
class ServedScenario:
    """As `Scenario`. `needs` names what a server must report (`abilities.py`)."""

    name: str
    states: str
    proof: Mapping[str, int]
    run: Callable[[ServedStage], Iterator[Trial]]
    needs: tuple[str, ...] = ()


@dataclass
class ServedStage:
    """A server with the items that scenarios share. `alone` computes what is expected; once for each item."""

    endpoint: Endpoint
    work: Work
    vocab_size: int
    alone: Expected
    able: Abilities = field(default_factory=Abilities)
    _known: dict[tuple[tuple[int, ...], bytes], Outcome] = field(default_factory=dict)

    @cached_property
    def items(self) -> list[Item]:
        """Ragged prompts under every way of sampling."""
        return make_items(
            self.work.items,
            vocab_size=self.vocab_size,
            longest=min(self.endpoint.longest, 1024),
            output_tokens=self.work.output_tokens,
            kinds=self.able.kinds,
        )

    def tokens(self, count: int, seed: int) -> list[int]:
        """Random token ids."""
        source = random.Random(seed)
        return [source.randrange(self.vocab_size) for _ in range(count)]

    def expected(self, item: Item) -> Outcome:
        """What the reply must be."""
        if item.key not in self._known:
            self._known[item.key] = self.alone(item)
        return self._known[item.key]

    def check(self, item: Item, got: Outcome) -> Check:
        """A reply beside what it must be."""
        return Check(item, self.expected(item), got)

    def compare(self, items: list[Item], outcomes: list[Outcome], **evidence: int) -> Trial:
        """Replies beside what they must be."""
        seen = Counter({name.replace("_", " "): count for name, count in evidence.items()})
        seen["cached tokens"] += sum(outcome.cached_tokens for outcome in outcomes)
        return Trial([self.check(item, got) for item, got in zip(items, outcomes, strict=True)], seen)


def _process(stage: ServedStage) -> Iterator[Trial]:
    for item in stage.items:
        yield stage.compare([item], [stage.endpoint.one(item)], requests=1)


def _streaming(stage: ServedStage) -> Iterator[Trial]:
    for item in stage.items[:10]:
        yield stage.compare([item], [stage.endpoint.stream(item)], streams=1)


def _batch(stage: ServedStage) -> Iterator[Trial]:
    for size in (2, 8, 9, 17, 33, 64):
        chosen = [stage.items[i % len(stage.items)] for i in range(size)]
        for item in chosen:
            stage.expected(item)
        yield stage.compare(chosen, stage.endpoint.many(chosen), requests_at_once=size)


def _order(stage: ServedStage) -> Iterator[Trial]:
    chosen = stage.items[:16]
    for order in (list(reversed(chosen)), random.Random(5).sample(chosen, len(chosen))):
        outcomes = stage.endpoint.many(order, stagger_seconds=0.01)
        yield stage.compare(order, outcomes, orders=1)


def _neighbours(stage: ServedStage) -> Iterator[Trial]:
    target = make_item("target", stage.tokens(70, 7), 7, stage.work.long_tokens, temperature=1.0)
    long = make_item("long", stage.tokens(min(stage.endpoint.longest // 2, 700), 9), 9, 8)
    repeated = make_item("repeated", stage.tokens(1, 10) * 300, 10, 8)
    sharer = target.but("sharer", prompt=[*target.prompt, *stage.tokens(60, 13)])
    stage.expected(target)
    for pieces in (1, 5, 19):
        with ThreadPoolExecutor(5) as pool:
            left = [pool.submit(stage.endpoint.stream, each, leave_after=pieces) for each in (sharer, long)]
            others = [pool.submit(stage.endpoint.one, each) for each in (long, repeated)]
            got = pool.submit(stage.endpoint.one, target).result()
            cancelled = sum(future.result().finish_reason == "abort" for future in left)
            neighbours = [future.result() for future in others]
        yield stage.compare([target], [got], cancelled=cancelled, neighbours=len(neighbours))


def _prefix(stage: ServedStage) -> Iterator[Trial]:
    for length in PREFIX_LENGTHS:
        if length + stage.work.output_tokens + 8 > stage.endpoint.longest:
            continue
        shared = stage.tokens(length, 200 + length)
        item = make_item(f"prefix {length}", [*shared, *stage.tokens(3, 2)], length, stage.work.output_tokens)
        stage.expected(item)
        stage.endpoint.one(make_item("warm", [*shared, *stage.tokens(5, 1)], 1, 2))
        outcomes = [stage.endpoint.one(item) for _ in range(2)]
        yield stage.compare([item] * 2, outcomes, prefix_lengths=1)


def _prefill(stage: ServedStage) -> Iterator[Trial]:
    for item in stage.items[:12]:
        outcome = stage.expected(item)
        whole = item.but(item.name, prompt=[*item.prompt, *outcome.token_ids], max_tokens=1, min_tokens=0)
        found = stage.endpoint.one(whole, prompt_logprobs=0)
        got = replace(outcome, bits=found.prompt_bits[len(item.prompt) - 1 :])
        yield Trial([Check(item, outcome, got)], Counter({"teacher-forced tokens": len(got.bits)}))


def _samples(stage: ServedStage) -> Iterator[Trial]:
    group = make_item("group", stage.tokens(37, 500), 31337, stage.work.output_tokens, temperature=1.0)
    replies = stage.endpoint.complete(group, n=6)
    members = [group.but(f"sample {i}", seed=seed) for i, seed in enumerate(sample_seeds(group.seed, 6))]
    reported = sum(reply.seed == member.seed for reply, member in zip(replies, members, strict=True))
    different = len({reply.outcome.token_ids for reply in replies})
    yield stage.compare(
        members, [reply.outcome for reply in replies], seeds_as_documented=reported, different_samples=different
    )
    unseeded = stage.endpoint.complete(group, n=4, seed=None)
    drawn = [group.but(f"drawn {i}", seed=reply.seed or 0) for i, reply in enumerate(unseeded)]
    yield stage.compare(drawn, [reply.outcome for reply in unseeded], fresh_seeds=len({r.seed for r in unseeded}))


def _later(stage: ServedStage) -> Iterator[Trial]:
    first = stage.items[0]
    again = [stage.endpoint.one(first) for _ in range(3)]
    yield stage.compare([first] * 3, again, repetitions=3)


def _mixed(stage: ServedStage) -> Iterator[Trial]:
    """Seeded requests among unseeded ones, which differ from each other."""
    seeded = stage.items[:4]
    open_seed = make_item("unseeded", stage.tokens(20, 77), 1, stage.work.output_tokens, temperature=1.0)
    for item in seeded:
        stage.expected(item)
    with ThreadPoolExecutor(8) as pool:
        free = [pool.submit(stage.endpoint.complete, open_seed, seed=None) for _ in range(4)]
        outcomes = list(pool.map(stage.endpoint.one, seeded))
        different = len({future.result()[0].outcome.token_ids for future in free})
    yield stage.compare(seeded, outcomes, different_unseeded_replies=different)


SERVED: tuple[ServedScenario, ...] = (
    ServedScenario("served", "a request alone = the same again", {"requests": 10}, _process),
    ServedScenario("streaming", "streamed = not streamed", {"streams": 5}, _streaming, (abilities.STREAMED_LOGPROBS,)),
    ServedScenario("batch", "alone = many at once", {"requests at once": 64}, _batch),
    ServedScenario("order", "any order of arrival", {"orders": 2}, _order),
    ServedScenario("neighbours", "any neighbours, cancelled or not", {"cancelled": 4, "neighbours": 6}, _neighbours),
    ServedScenario("seeds", "seeded among unseeded requests", {"different unseeded replies": 4}, _mixed),
    ServedScenario(
        "prefix",
        "cold = prefix from the cache",
        {"prefix lengths": 7, "cached tokens": PAGE_SIZE},
        _prefix,
        (abilities.CACHED_TOKENS,),
    ),
    ServedScenario(
        "prefill",
        "decode = prompt logprobs",
        {"teacher-forced tokens": 50},
        _prefill,
        (abilities.PROMPT_LOGPROBS,),
    ),
    ServedScenario(
        "samples",
        "n samples = n requests with the reported seeds",
        {"seeds as documented": 6, "different samples": 4, "fresh seeds": 4},
        _samples,
        needs=(abilities.SAMPLE_SEEDS,),
    ),
    ServedScenario("later", "first request = later ones", {"repetitions": 3}, _later),
)
"""Scenarios over HTTP. Preemption cannot be forced from outside; it is tested in process."""
