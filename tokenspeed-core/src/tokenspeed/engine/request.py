"""One request, as the engine sees it: token ids in, token ids and logprobs out. Text is somebody else's business.

All types here are msgspec structs: they cross a process boundary as msgpack, never as pickle. No torch here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to continue one prompt. Field names and defaults follow vLLM's `SamplingParams`.

    `temperature` 0 is greedy. `top_k` 0 (or -1) keeps all. `seed` None draws a fresh random seed for every sample,
    which the reply reports. `logprobs` is how many alternatives to report beside the sampled token (0: the sampled
    token only, None: nothing, -1: the whole vocabulary); `prompt_logprobs` likewise for the prompt. As in vLLM, `stop`
    may be given as one string, and both lists of stops as None; they are lists afterwards.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        given: object = self.stop
        if isinstance(given, str):  # also a sequence of strings: each of its characters would stop
            msgspec.structs.force_setattr(self, "stop", [given])
        for name in ("stop", "stop_token_ids"):
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, [])


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to produce: `n` samples are `n` requests with derived seeds (`derive_seed`), made before the engine.

    `id` is unique inside the engine. `seed` is always set here. `arrival` is `time.monotonic()` seconds.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    arrival: float = 0.0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's fp32 log-probability (as a Python float that holds the fp32 exactly) and its rank (1 is the best)."""

    id: int
    logprob: float
    rank: int


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position: the actual token, then the asked-for alternatives, best first, ties by token id."""

    token: TokenLogprob
    top: list[TokenLogprob] = []


class TokenUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one request. Lists are parallel; `logprobs` is as long as `token_ids` when asked for.

    `text` is the new, complete-characters-only text with stop strings already cut. `prompt_logprobs` comes once, with
    the first update; its first entry is None. `finish_reason` is set on the last update only; `stop_reason` is then the
    stop string or stop token id that ended it, or None for the end-of-sequence token. `fingerprint` comes with it: what
    determined the bits of the sample. A sample that was under way when the weights were exchanged has one for each set
    of weights, joined by `+`, which equals no other's.
    """

    id: str
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    seed: int = 0
    weight_version: str = ""
    fingerprint: str = ""
