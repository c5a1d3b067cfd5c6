"""Sizes and modes of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.engine.buckets import Bucket


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and modes of one engine, all decided.

    `num_pages` of 16 tokens must hold `max_model_len` tokens; `max_num_batched_tokens` must reach `max_num_seqs`.
    `max_chunk_tokens` bounds a prefill chunk (None: the budget alone). `eos_ids` end a request unless it ignores them.
    Decode steps that fit one of `decode_buckets` are recorded. With `ahead`, a decode step may be issued before the
    tokens of the one in front of it were read back. `warm_up_tokens` are sizes of steps that are computed once for
    nobody, so that what their kernels compile is compiled before the first request. None of these changes a bit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    max_chunk_tokens: int | None = None
    prefix_caching: bool = True
    raw_logprobs: bool = False
    max_logprobs: int = 20
    weight_version: str = ""
    eos_ids: tuple[int, ...] = ()
    device: str = "cpu"
    decode_buckets: tuple[Bucket, ...] = ()
    ahead: bool = False
    warm_up_tokens: tuple[int, ...] = ()
