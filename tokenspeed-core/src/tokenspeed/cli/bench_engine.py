"""What `bench throughput` and `bench latency` measure: one batch of random prompts through an engine in this process.

Knows the engine; does not know how results are printed. Prompts never repeat, so that no prefix is cached.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenspeed.config import EngineConfig
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.kv_cache import pages_for
from tokenspeed.engine.options import EngineOptions
from tokenspeed.engine.request import Request, SamplingParams
from tokenspeed.errors import ConfigError

FIRST_ORDINARY_ID = 10
"""Lower ids are special tokens in most vocabularies."""


@dataclass
class Timing:
    """One batch, in seconds: `first_tokens` of each request since the start, `steps` the duration of each step.

    `own` is the part of each step that no operator took.
    """

    total: float = 0.0
    first_tokens: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)


class Workload:
    """Batches of `batch` random prompts of `input_len` tokens, each continued greedily by `output_len` tokens."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._names = self._count()

    def run(self, batch: int, input_len: int, output_len: int) -> Timing:
        """Run one batch to its end. Raises ConfigError for one that the engine would cut short or into parts."""
        self._check(batch, input_len + output_len)
        for _ in range(batch):
            self._engine.add(self._request(input_len, output_len))
        timing = Timing()
        before = self._engine.stats()
        started = time.perf_counter()
        while self._engine.has_work:
            updates = self._engine.step()
            timing.total = time.perf_counter() - started
            for update in updates:
                timing.first_tokens.setdefault(update.id, timing.total)
            after = self._engine.stats()
            step = after.step_seconds - before.step_seconds
            timing.steps.append(step)
            timing.own.append(step - (after.operator_seconds - before.operator_seconds))
            before = after
        return timing

    def _check(self, batch: int, tokens: int) -> None:
        options = self._engine.options
        pages = batch * pages_for(tokens)
        work = f"{batch} requests of {tokens} tokens with their replies are to be measured"
        if tokens > options.max_model_len:
            limit, remedy = f"the context of this engine holds {options.max_model_len}", "shorter ones"
        elif batch > options.max_num_seqs:
            limit, remedy = f"this engine runs {options.max_num_seqs} at once", "fewer"
        elif pages > options.num_pages:
            limit, remedy = f"they take {pages} pages of its KV cache, which has {options.num_pages}", "less"
        else:
            return
        raise ConfigError(f"{work}, and {limit}; measure {remedy}, or give the engine larger sizes")

    def _request(self, input_len: int, output_len: int) -> Request:
        first = min(FIRST_ORDINARY_ID, self._engine.limits.vocab_size - 1)
        prompt = [self._rng.randrange(first, self._engine.limits.vocab_size) for _ in range(input_len)]
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        return Request(id=next(self._names), prompt=prompt, params=params, seed=0)

    @staticmethod
    def _count() -> Iterator[str]:
        number = 0
        while True:
            yield f"bench-{number}"
            number += 1


def null_engine(config: EngineConfig, *, max_requests: int, longest: int) -> Engine:
    """An engine with the model's vocabulary and tokenizer, whose model and operators compute nothing."""
    from tokenspeed.engine.null_model import NullModel, null_operators
    from tokenspeed.startup import prepare
    from tokenspeed.tokenizer import Tokenizer

    prepared = prepare(config)
    vocab_size = prepared.built.model.vocab_size
    options = EngineOptions(
        max_num_seqs=max_requests,
        max_num_batched_tokens=max(max_requests, config.max_num_batched_tokens),
        max_model_len=longest,
        num_pages=(max_requests + 1) * pages_for(longest + 1),
        eos_ids=tuple(sorted(prepared.checkpoint.eos_token_ids)),
    )
    tokenizer = Tokenizer.from_directory(prepared.checkpoint.folder)
    return Engine(NullModel(vocab_size), null_operators(vocab_size), tokenizer, options)
