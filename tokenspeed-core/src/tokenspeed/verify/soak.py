"""Many clients for a long time: random arrivals, streams, cancellations and a cache that is too small for all of them.

Every complete reply must be what the same request gets alone. Expected replies are computed before the clients start.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

from tokenspeed.verify.abilities import PREEMPTIONS
from tokenspeed.verify.items import SAMPLING, Item, Outcome, make_item
from tokenspeed.verify.scenario import Check, Trial
from tokenspeed.verify.served import ServedScenario, ServedStage

SOAK = "soak"
CLIENTS = 64
PROMPTS = 48
OUTPUT_TOKENS = 90
LONGEST_PAUSE_SECONDS = 0.05
REPORT_EVERY_SECONDS = 1.0

SERVER_SIZES = {"max_model_len": 320, "num_kv_pages": 48, "max_num_seqs": 48, "max_num_batched_tokens": 256}
"""A server under these has pages for a tenth of what the clients ask for."""


def soak_scenario(seconds: float) -> ServedScenario:
    """A scenario that runs for `seconds`."""
    proof = {"complete replies": 50, "cancelled": 5, "streams": 5, "preemptions": 1, "cached tokens": 1}
    return ServedScenario(
        SOAK,
        f"{CLIENTS} clients, random arrivals and cancellations, too few pages",
        proof,
        lambda stage: _soak(stage, seconds),
        needs=(PREEMPTIONS,),
    )


def soak_items(stage: ServedStage) -> list[Item]:
    """Prompts of which many share a beginning, under every way of sampling."""
    source = random.Random(64)
    stems = [stage.tokens(length, 600 + length) for length in (16, 33, 64, 130)]
    items = []
    for i in range(PROMPTS):
        name, params = SAMPLING[i % len(SAMPLING)]
        prompt = [*source.choice(stems), *stage.tokens(source.randrange(1, 40), 700 + i)]
        items.append(make_item(f"soak {i}: {name}", prompt, 900 + i, 8 + 7 * i % OUTPUT_TOKENS, **params))
    return items


class _Client(threading.Thread):
    """One client: a request, a pause, the next one."""

    def __init__(
        self, stage: ServedStage, items: list[Item], number: int, until: float, results: queue.Queue[object]
    ) -> None:
        super().__init__(name=f"soak-{number}", daemon=True)
        self._stage, self._items, self._until, self._results = stage, items, until, results
        self._source = random.Random(number)

    def run(self) -> None:
        while time.monotonic() < self._until:
            time.sleep(self._source.random() * LONGEST_PAUSE_SECONDS)
            item, kind = self._source.choice(self._items), self._source.random()
            try:
                self._results.put((item, *self._ask(item, kind)))
            except Exception as error:
                self._results.put(error)
                return

    def _ask(self, item: Item, kind: float) -> tuple[str, Outcome]:
        endpoint = self._stage.endpoint
        if kind < 0.6:
            return "whole", endpoint.one(item)
        if kind < 0.8:
            return "stream", endpoint.stream(item)
        return "left", endpoint.stream(item, leave_after=self._source.randrange(1, 20))


def _soak(stage: ServedStage, seconds: float) -> Iterator[Trial]:
    items = soak_items(stage)
    for item in items:
        stage.expected(item)
    before = _stats(stage)
    results: queue.Queue[object] = queue.Queue()
    until = time.monotonic() + seconds
    clients = [_Client(stage, items, number, until, results) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients) or not results.empty():
        time.sleep(REPORT_EVERY_SECONDS)
        yield _collect(stage, results)
    after = _stats(stage)
    gained = {name: after[name] - before[name] for name in ("preemptions", "cached_tokens")}
    yield Trial([], Counter({name.replace("_", " "): count for name, count in gained.items()}))


def _collect(stage: ServedStage, results: queue.Queue[object]) -> Trial:
    """What has arrived. A request that was left early is compared as far as it came. Raises what a client met."""
    checks: list[Check] = []
    seen: Counter[str] = Counter()
    while not results.empty():
        found = results.get()
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, tuple)
        item, kind, outcome = found
        expected = stage.expected(item)
        if kind == "left" and outcome.finish_reason == "abort":
            seen["cancelled"] += 1
            count = len(outcome.token_ids)
            expected = Outcome(expected.token_ids[:count], expected.bits[:count], finish_reason="abort")
        else:
            seen["complete replies"] += 1
            seen["streams"] += kind != "whole"
        checks.append(Check(item, expected, outcome))
    return Trial(checks, seen)


def _stats(stage: ServedStage) -> dict[str, int]:
    stats: dict[str, int] = stage.endpoint.get("/server_info")["internal_states"][0]
    return stats
