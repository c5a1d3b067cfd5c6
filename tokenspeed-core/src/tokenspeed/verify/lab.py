"""An in-process model and as many small engines around it as a harness wants: conditions are run here.

The model is loaded once, through the ordinary start; its tokenizer is not needed. Every script gets an engine of its
own over it, so that sizes, chunks, pages and circumstances are the script's, and no state leaks from one condition to
the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tokenspeed import startup
from tokenspeed.config import EngineConfig
from tokenspeed.engine.buckets import Bucket
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.kv_cache import pages_for
from tokenspeed.engine.options import EngineOptions
from tokenspeed.engine.runner import Model, Observer
from tokenspeed.engine.sampler import SamplingOperators
from tokenspeed.errors import ConfigError
from tokenspeed.layers.context import Operation
from tokenspeed.models.base import CausalLM
from tokenspeed.numerics.certificate import Certificate
from tokenspeed.numerics.plan import Plan
from tokenspeed.verify.items import Item, Outcome
from tokenspeed.verify.script import Run, Script, Watch, alone, drive, pages_needed

LONGEST = 1024
"""Longest request of a harness, in tokens: it bounds what the small engines reserve."""

DIRT = 3e4
"""Magnitude of what `dirty_pages` writes: finite in every dtype, and far above any activation."""


SMALL_PARAMETERS = 32_000_000
"""A model below this runs on one thread unless a script wants more: its steps are too short to share."""


class TiedModel:
    """A model whose logits make each even token id and the odd one after it exactly equally likely, row by row."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.forward = model.forward
        self.kv_specs = model.kv_specs

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R,V] of the model, the odd columns overwritten with their left neighbours."""
        logits = self._model.compute_logits(hidden).clone()
        odd = logits[:, 1::2]
        odd.copy_(logits[:, 0::2][:, : odd.shape[1]])
        return logits


class Lab:
    """One loaded model under one plan.

    `rehash` hashes the weights even where an earlier result for the same files is known. `boot` is the reply to the
    first request that it ever computed; `threads` is what scripts run on that do not say.
    """

    def __init__(self, config: EngineConfig, progress: startup.Progress | None = None, *, rehash: bool = False) -> None:
        prepared = startup.prepare(config)
        self.config = config
        self.plan: Plan = prepared.plan
        # Scripts have contexts of their own, which may be longer than what an engine of this configuration serves.
        self._context = min(max(LONGEST, prepared.sizes.max_model_len), prepared.built.model.max_positions)
        prepared.built.model.limit_context(self._context)
        self.certificate: Certificate = startup.load(prepared, progress, rehash=rehash)
        self.model: CausalLM = prepared.built.model
        self.operations: list[Operation] = prepared.built.context.operations
        self.sampling: SamplingOperators = prepared.built.operators
        self.longest = min(LONGEST, prepared.sizes.max_model_len)
        self.threads = 1 if _parameters(prepared) < SMALL_PARAMETERS else torch.get_num_threads()
        self.boot: Outcome | None = None
        self._options: EngineOptions = startup.engine_options(prepared)
        self._alone: dict[tuple[tuple[int, ...], bytes], Outcome] = {}

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.model.vocab_size

    def kernels(self, operator: str) -> list[str]:
        """Names of the kernels that serve an operator, sorted."""
        return sorted({spec.name for need, spec in self.plan.choices.items() if need.operator == operator})

    def warm_up(self, item: Item) -> None:
        """Keep the reply to the very first request, for the comparison with later ones."""
        if self.boot is None:
            self.boot = self.run(alone(item)).outcomes[0]

    def alone(self, item: Item) -> Outcome:
        """The reply to `item` on an idle engine that has seen nothing; computed once."""
        if item.key not in self._alone:
            self._alone[item.key] = self.run(alone(item)).outcomes[0]
        return self._alone[item.key]

    def run(self, script: Script, observer: Observer | None = None, label: str = "v") -> Run:
        """Run a script on a new engine. `observer` watches every operator, in the place of the counting one."""
        engine = self.engine(script, watched=observer is not None)
        watch = Watch()
        engine.observe(observer or watch)
        with _circumstances(script, self.threads):
            outcomes = drive(engine, script, label)
        stats = engine.stats()
        watch.evidence["chunked prefills"] += stats.chunked_prefills
        watch.evidence["cached tokens"] += stats.cached_tokens
        watch.evidence["preemptions"] += stats.preemptions
        watch.evidence["recorded steps"] += engine.replays
        watch.evidence["steps ahead"] += engine.steps_ahead
        watch.evidence["cancelled"] += sum(outcome.finish_reason == "abort" for outcome in outcomes)
        return Run(outcomes, watch.evidence, frozenset(watch.batch_sizes))

    def engine(self, script: Script, *, watched: bool = False) -> Engine:
        """A new engine of the script's sizes over the loaded model.

        One that is `watched` issues a step when it knows the tokens of the one before, and on a GPU records none: what
        runs in a graph calls no operator that could be watched.
        """
        setup = script.setup
        tokens = max(len(item.prompt) + (item.params.max_tokens or 0) for item in script.items())
        if tokens > self._context:
            raise ConfigError(
                f"a script of the verification has a context of {tokens} tokens, the model's ends at {self._context}"
            )
        longest = tokens + 1
        pages = pages_needed(script) if setup.pages is None else setup.pages
        buckets = tuple(Bucket(rows, pages_for(longest)) for rows in setup.bucket_rows)
        options = replace(
            self._options,
            max_num_seqs=min(setup.max_seqs, setup.budget),
            max_num_batched_tokens=setup.budget,
            max_chunk_tokens=setup.max_chunk,
            max_model_len=longest,
            num_pages=max(pages, pages_for(longest)),
            prefix_caching=setup.prefix_caching,
            decode_buckets=() if watched and self._options.device == "cuda" else buckets,
            ahead=self._options.ahead and not watched,
        )
        model: Model = TiedModel(self.model) if setup.ties else self.model
        engine = Engine(model, self.sampling, None, options)
        if setup.dirty_pages:
            _soil(engine)
        return engine


def _parameters(prepared: startup.Prepared) -> int:
    tensors = prepared.checkpoint.tensors.values()
    return sum(torch.Size(tensor.shape).numel() for tensor in tensors)


def _soil(engine: Engine) -> None:
    """Fill every KV page with large finite numbers, as requests of another model would leave them."""
    generator = torch.Generator().manual_seed(1)
    for layer in engine.kv_tensors():
        for tensor in layer:
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.copy_((noise - 0.5) * (2 * DIRT))


@contextmanager
def _circumstances(script: Script, threads_unless_given: int) -> Iterator[None]:
    """Threads and the contents of fresh memory, as the script wants them; as before afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    try:
        torch.set_num_threads(script.setup.threads or threads_unless_given)
        if script.setup.dirty_memory:
            # In this mode torch fills whatever it allocates, and does not otherwise initialise, with NaN.
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = True
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = filled
