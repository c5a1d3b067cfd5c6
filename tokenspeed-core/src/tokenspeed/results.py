"""What `LLM` returns. Names follow vLLM's `RequestOutput` and `CompletionOutput`, so that code moves over easily."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed.engine.request import FinishReason, PositionLogprobs, TokenUpdate
from tokenspeed.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability: fp32, held exactly by a Python float; `rank` 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


Position = dict[int, Logprob]
"""Logprobs at one position by token id: the actual token first, then the alternatives, best first."""


@dataclass
class CompletionOutput:
    """One sample. `seed` replays it: the same prompt and parameters with this seed and n=1 give the same tokens.

    `logprobs` holds one entry for each token when they were asked for, and `cumulative_logprob` is then their sum.
    `finish_reason` is `stop`, `length`, `abort` or `error`; `stop_reason` the stop string or stop token id, or None for
    the end-of-sequence token; `error` says what went wrong.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Position] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    seed: int = 0
    error: str | None = None
    preemptions: int = 0
    weight_version: str = ""


@dataclass
class RequestOutput:
    """All samples of one prompt. `prompt` is None when the prompt came as token ids.

    `prompt_logprobs` (when asked for) is as long as the prompt; its first entry is None. `num_cached_tokens` is how
    many tokens of the prompt the first sample took from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Position | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Every sample has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True)
class Score:
    """Teacher-forced log-probabilities: `logprobs[i]` = log p(token_ids[i] | token_ids[:i]); the first is None."""

    token_ids: list[int]
    logprobs: list[float | None]

    @property
    def total(self) -> float:
        """Sum of the log-probabilities, added from left to right in double precision."""
        return sum(value for value in self.logprobs if value is not None)


def absorb(request: RequestOutput, output: CompletionOutput, update: TokenUpdate, tokenizer: Tokenizer | None) -> None:
    """Add an engine update to the sample that it belongs to."""
    output.token_ids += update.token_ids
    output.text += update.text
    output.seed, output.preemptions = update.seed, update.preemptions
    output.weight_version = update.weight_version
    if update.logprobs is not None:
        output.logprobs = output.logprobs or []
        output.cumulative_logprob = output.cumulative_logprob or 0.0
        for entry in update.logprobs:
            output.logprobs.append(_position(entry, tokenizer))
            output.cumulative_logprob += entry.token.logprob
    if update.prompt_logprobs is not None:
        request.prompt_logprobs = [
            None if entry is None else _position(entry, tokenizer) for entry in update.prompt_logprobs
        ]
    if output.index == 0:
        request.num_cached_tokens = update.cached_tokens
    if update.finish_reason is not None:
        output.finish_reason, output.stop_reason, output.error = (
            update.finish_reason,
            update.stop_reason,
            update.error,
        )


def _position(entry: PositionLogprobs, tokenizer: Tokenizer | None) -> Position:
    position: Position = {}
    for token in (entry.token, *entry.top):
        if token.id not in position:
            text = tokenizer.token_text(token.id) if tokenizer is not None else ""
            position[token.id] = Logprob(token.logprob, token.rank, text)
    return position
