"""Who computes what in the next step: first come, first served, within a token budget and a pool of pages.

Knows token counts, seats and pages; does not know tensors of the model, sampling or text.

Rules, which together mean that nobody starves:
* Requests run in order of arrival. Every running request that is ready to decode gets one token of the budget (the
  budget is at least the number of seats); what is left goes to prefill chunks, the oldest request first.
* A request is admitted when a seat is free and pages for all its tokens are available beside one for every running
  request. The head of the queue is never overtaken.
* When a running request finds no page, the youngest running request is preempted: it loses its pages and its seat and
  goes back to the head of the queue, to be recomputed (prompt and generated tokens) later. So the oldest request always
  advances, and the pool holds at least one request of maximal length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from tokenspeed.engine.kv_cache import KVCache, pages_for
from tokenspeed.engine.prefix_cache import ChainKey, chain_keys, root_key
from tokenspeed.engine.state import RequestState
from tokenspeed.kernels.operators import PAGE_SIZE


@dataclass
class Schedule:
    """One step's work. `decodes` feed one token each; `chunks` feed `counts[i]` tokens from their `computed` on."""

    decodes: list[RequestState] = field(default_factory=list)
    chunks: list[RequestState] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing can be computed."""
        return not self.decodes and not self.chunks


class Scheduler:
    """Queue, seats and pages. `max_chunk` bounds the tokens of one prefill chunk (None: the budget alone)."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_seats: int,
        token_budget: int,
        prefix_caching: bool = True,
        weight_version: str = "",
        max_chunk: int | None = None,
    ) -> None:
        if token_budget < max_seats:
            raise ValueError(f"token budget {token_budget} is less than the {max_seats} seats that may decode at once")
        self.cache = cache
        self.waiting: OrderedDict[str, RequestState] = OrderedDict()
        self.running: OrderedDict[str, RequestState] = OrderedDict()
        self.preemptions = 0
        self.chunked_prefills = 0
        self.cached_tokens = 0
        self._free_seats = list(range(max_seats - 1, -1, -1))
        self._token_budget = token_budget
        self._max_chunk = max_chunk or token_budget
        self._prefix_caching = prefix_caching
        self._root: ChainKey = root_key(weight_version)

    def add(self, state: RequestState) -> None:
        """Queue a request behind all others."""
        self.waiting[state.id] = state

    def find(self, request_id: str) -> RequestState | None:
        """The waiting or running request with this id."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def schedule(self) -> Schedule:
        """Choose the next step's tokens and give every chosen request the pages that they need."""
        plan = Schedule()
        budget = self._token_budget - sum(state.remaining == 1 for state in self.running.values())
        preemptions_before = self.preemptions
        # Copied, because preemption removes requests from the end, all of them younger than the current one.
        for state in list(self.running.values()):
            if state.seat < 0:
                continue
            if state.remaining == 1:
                if self._grow(state):
                    plan.decodes.append(state)
            elif budget > 0:
                budget -= self._add_chunk(plan, state, budget)
        while budget > 0 and self.preemptions == preemptions_before and (admitted := self._admit_next()):
            budget -= self._add_chunk(plan, admitted, budget)
        return plan

    def ahead(self, sampled: list[RequestState]) -> Schedule | None:
        """The decode step after one whose tokens for `sampled` nobody has read yet, or None where they must be read.

        It goes ahead when nothing but the tokens could change it: every request that runs is in `sampled`, nobody waits
        who could be seated, and everyone's next page is at hand. A request that one of the unread tokens ends takes
        part for nothing. One that ends for want of room does not take part.
        """
        going = [state for state in sampled if state.length + 1 < state.max_total]
        seats = bool(self._free_seats) or len(going) < len(sampled)
        if not going or len(sampled) < len(self.running) or (self.waiting and seats):
            return None
        growing = [state for state in going if state.length >= len(state.pages) * PAGE_SIZE]
        if len(growing) > self.cache.available:
            return None
        for state in growing:
            pages = self.cache.allocate(1)
            assert pages is not None
            self._append_pages(state, pages)
        return Schedule(decodes=going)

    def computed(self, state: RequestState, count: int) -> None:
        """`count` more tokens of `state` went through the model: publish the pages that they filled."""
        before = state.computed
        state.computed = after = before + count
        if self._prefix_caching and before // PAGE_SIZE != after // PAGE_SIZE:
            chain_keys(self._root, state.tokens(0, after), state.chain)
            for page in range(before // PAGE_SIZE, after // PAGE_SIZE):
                self.cache.publish(state.chain[page], state.pages[page])

    def finish(self, state: RequestState, *, poisoned: bool = False) -> None:
        """Take a request out and free its seat and pages at once; `poisoned` pages hold NaN and must not be reused."""
        if state.seat < 0:
            del self.waiting[state.id]
            return
        del self.running[state.id]
        if poisoned:
            self.cache.discard(state.pages)
            state.pages = []
        self._unseat(state)

    def preempt(self, request_ids: Collection[str]) -> int:
        """Send these running requests and all younger ones back to the queue; how many went."""
        before = self.preemptions
        while not self.running.keys().isdisjoint(request_ids):
            self._preempt_youngest()
        return self.preemptions - before

    def forget_prefixes(self) -> None:
        """Start with an empty prefix cache; running requests keep their pages, which others can no longer find."""
        self.cache.forget_prefixes()

    def change_weights(self, weight_version: str) -> None:
        """Nothing that the old weights computed is read again; running requests are recomputed from their tokens."""
        self.preempt(list(self.running))
        self.cache.forget_prefixes()
        self._root = root_key(weight_version)
        for state in self.waiting.values():
            state.forget_weights()

    def _add_chunk(self, plan: Schedule, state: RequestState, budget: int) -> int:
        count = min(state.remaining, budget, self._max_chunk)
        self.chunked_prefills += count < state.remaining
        plan.chunks.append(state)
        plan.counts.append(count)
        return count

    def _grow(self, state: RequestState) -> bool:
        """Make sure that `state` has a page for its next position; False when it was preempted itself."""
        if state.computed < len(state.pages) * PAGE_SIZE:
            return True
        while (pages := self.cache.allocate(1)) is None:
            self._preempt_youngest()
            if state.seat < 0:
                return False
        self._append_pages(state, pages)
        return True

    def _admit_next(self) -> RequestState | None:
        """Seat the head of the queue if its pages are available, reusing cached ones; else None."""
        if not self.waiting or not self._free_seats:
            return None
        state = next(iter(self.waiting.values()))
        cached = self._cached_prefix(state)
        fresh = pages_for(state.length) - len(cached)
        reserve = len(self.running)
        if fresh + reserve + self.cache.idle_among(cached) > self.cache.available:
            return None
        del self.waiting[state.id]
        self.running[state.id] = state
        state.seat = self._free_seats.pop()
        self.cache.acquire(cached)
        pages = self.cache.allocate(fresh)
        assert pages is not None
        self._append_pages(state, cached + pages)
        state.computed = len(cached) * PAGE_SIZE
        if state.preemptions == 0:
            state.cached_tokens = state.computed
        self.cached_tokens += state.computed
        return state

    def _cached_prefix(self, state: RequestState) -> list[int]:
        """Cached pages that `state` may start from: all but the last token at most, since that one's logits are due."""
        if not self._prefix_caching:
            return []
        chain_keys(self._root, state.tokens(), state.chain)
        if state.wants_prompt_rows:
            return []
        return self.cache.match(state.chain[: (state.length - 1) // PAGE_SIZE])

    def _append_pages(self, state: RequestState, pages: list[int]) -> None:
        self.cache.set_page_table(state.seat, len(state.pages), pages)
        state.pages.extend(pages)

    def _preempt_youngest(self) -> None:
        request_id, state = self.running.popitem()
        self._unseat(state)
        state.computed = 0
        state.preemptions += 1
        self.preemptions += 1
        self.waiting[request_id] = state
        self.waiting.move_to_end(request_id, last=False)

    def _unseat(self, state: RequestState) -> None:
        self.cache.release(state.pages)
        state.pages = []
        self._free_seats.append(state.seat)
        state.seat = -1
