"""What a scenario is: trials, each of some checks, and what must be proved to have happened meanwhile.

A trial compares replies, which were computed under some condition, with what they must be, usually the reply to the
same request alone. The counters of all trials of a scenario are added up; a scenario that cannot show its mechanism at
work fails as vacuous, whatever it compared.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from tokenspeed.verify.items import Item, Outcome, make_item, make_items
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Script, Setup, alone

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
