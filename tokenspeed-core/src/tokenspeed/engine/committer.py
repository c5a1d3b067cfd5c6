"""What a step means for its requests: their tokens are appended, what is over is ended, and each of them says so.

Knows tokens, text and when a request ends; does not know tensors, or how anything was computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.engine.flight import Flight
from tokenspeed.engine.request import FinishReason, PositionLogprobs, TokenUpdate
from tokenspeed.engine.scheduler import Schedule, Scheduler
from tokenspeed.engine.state import RequestState


@dataclass(frozen=True)
class Stamp:
    """Put on updates: the version of the weights that compute, and in short what determines the bits ("": unknown)."""

    weight_version: str
    fingerprint: str


class Committer:
    """Commits steps that were waited for. `stamp` is replaced when the weights are.

    `prompt_tokens`, `generated_tokens` and `finished_requests` count what was committed since the start.
    """

    def __init__(self, scheduler: Scheduler, stamp: Stamp) -> None:
        self.stamp = stamp
        self.prompt_tokens = self.generated_tokens = self.finished_requests = 0
        self._scheduler = scheduler

    def commit(self, flight: Flight) -> list[TokenUpdate]:
        """Append the tokens, end what has ended, and say so."""
        if flight.shed:
            return self._shed(flight)
        self._advance(flight.schedule)
        updates = [self._fail(state) for state in flight.poisoned]
        for row, (state, token) in enumerate(zip(flight.rows.sampled, flight.tokens, strict=True)):
            if state.seat >= 0:
                updates.append(self._commit_token(state, token, flight.logprobs.get(row)))
        updates += [self._finish(state, "length") for state in flight.rows.complete if state.seat >= 0]
        return updates

    def abort(self, state: RequestState) -> TokenUpdate:
        """End a request that waits or runs, and free what it holds; its last update."""
        return self._finish(state, "abort")

    def _shed(self, flight: Flight) -> list[TokenUpdate]:
        """Fail the requests whose prompts the device could not hold, or the youngest; the others are computed again."""
        schedule = flight.schedule
        states = schedule.chunks or schedule.decodes[-1:]
        return [self._finish(state, "error", error=f"out of memory: {flight.shed}") for state in states]

    def _advance(self, schedule: Schedule) -> None:
        for state in schedule.decodes:
            # One that ended while the step was in flight holds no page any more.
            if state.seat >= 0:
                self._scheduler.computed(state, 1)
        for state, count in zip(schedule.chunks, schedule.counts, strict=True):
            self._scheduler.computed(state, count)
            self.prompt_tokens += count

    def _commit_token(self, state: RequestState, token: int, logprobs: PositionLogprobs | None) -> TokenUpdate:
        if token < 0:
            return self._fail(state)
        state.append(token)
        if self.stamp.fingerprint not in state.fingerprints:
            state.fingerprints.append(self.stamp.fingerprint)
        self.generated_tokens += 1
        rules, stream, text = state.stop_rules, state.text, ""
        if token in rules.eos or token in rules.stop_ids:
            reason = None if token in rules.eos else token
            return self._finish(state, "stop", token=token, logprobs=logprobs, stop_reason=reason)
        if stream is not None:
            active = state.generated > state.request.params.min_tokens
            text, stop = stream.push(token, stops_active=active)
            if stop is not None:
                return self._finish(
                    state, "stop", token=token, logprobs=logprobs, stop_reason=stop, text=text, flush=False
                )
        if state.length >= state.max_total:
            return self._finish(state, "length", token=token, logprobs=logprobs, text=text)
        return self._update(state, token, logprobs, text)

    def _fail(self, state: RequestState) -> TokenUpdate:
        return self._finish(
            state,
            "error",
            poisoned=True,
            error="the model's logits hold NaN, +inf or nothing that may be sampled; other requests are not affected",
        )

    def _finish(
        self,
        state: RequestState,
        finish: FinishReason,
        *,
        token: int | None = None,
        logprobs: PositionLogprobs | None = None,
        text: str = "",
        stop_reason: int | str | None = None,
        flush: bool = True,
        poisoned: bool = False,
        error: str | None = None,
    ) -> TokenUpdate:
        """End a request and free what it holds. `flush` shows the text that was held back."""
        if flush and state.text is not None:
            rest, stop = state.text.finish(stops_active=state.generated > state.request.params.min_tokens)
            text += rest
            if stop is not None and finish == "length":
                finish, stop_reason = "stop", stop
        self._scheduler.finish(state, poisoned=poisoned)
        self.finished_requests += 1
        return self._update(state, token, logprobs, text, finish, stop_reason, error)

    def _update(
        self,
        state: RequestState,
        token: int | None,
        logprobs: PositionLogprobs | None,
        text: str,
        finish: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> TokenUpdate:
        first, state.first_update = state.first_update, False
        return TokenUpdate(
            id=state.id,
            token_ids=[] if token is None else [token],
            text=text,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=state.prompt_logprobs if first and not state.wants_prompt_rows else None,
            finish_reason=finish,
            stop_reason=stop_reason,
            error=error,
            cached_tokens=state.cached_tokens,
            preemptions=state.preemptions,
            seed=state.request.seed,
            weight_version=self.stamp.weight_version,
            fingerprint="" if finish is None else "+".join(state.fingerprints or [self.stamp.fingerprint]),
        )
