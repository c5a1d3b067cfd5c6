"""For tests of models: build one from a checkpoint and run it over a paged cache, with no engine and no plan.

A model author compares the logits with an implementation that he trusts, whole and in chunks.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.errors import StartRefused
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.kernels.reference.plugin import tokenspeed_kernels as reference_kernels
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import select
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.layers.context import LayerContext
from tokenspeed.loading.checkpoint import Checkpoint
from tokenspeed.machine import read_machine
from tokenspeed.models.base import CausalLM, KVSpec


def bind_kernels(ctx: LayerContext, kernels: Iterable[KernelSpec] | None = None, device: str = "cpu") -> None:
    """Bind every operation of `ctx` to the best of `kernels` (None: the reference kernels) on this machine.

    StartRefused when they do not serve everything.
    """
    specs = reference_kernels() if kernels is None else kernels
    selection = select(ctx.needs(), KernelRegistry(specs), read_machine(device))
    if selection.problems:
        raise StartRefused(selection.problems)
    for operation in ctx.operations:
        spec = selection.choices[operation.need]
        prepare = _function(spec.prepare_weights) if spec.prepare_weights else None
        operation.bind(_function(spec.implementation), prepare, spec)


def _function(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def load_model(
    model: type[CausalLM],
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    switches: Mapping[str, str] | None = None,
    kernels: Iterable[KernelSpec] | None = None,
    device: str = "cpu",
) -> CausalLM:
    """A model of class `model`, filled from the checkpoint in `folder` and ready to run.

    `dtype` None takes the checkpoint's own; `kernels` as for `bind_kernels`.
    """
    checkpoint = Checkpoint(folder)
    ctx = LayerContext(dtype or checkpoint.dtype, switches or {})
    built = model(checkpoint.config, ctx)
    bind_kernels(ctx, kernels, device)
    checkpoint.load(built, device=device)
    return built


class PagedModel:
    """A model and a cache. Sequences are numbers of the caller's choice; their pages are taken in a shuffled order.

    Nothing is ever freed: make a new one for each test.
    """

    def __init__(self, model: CausalLM, *, num_pages: int = 64, device: str = "cpu", seed: int = 0) -> None:
        self.model = model
        self.device = torch.device(device)
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._caches = [
            (self._cache(num_pages, spec, spec.head_dim), self._cache(num_pages, spec, spec.value_dim))
            for spec in model.kv_specs()
        ]

    def _cache(self, num_pages: int, spec: KVSpec, width: int) -> torch.Tensor:
        # NaN rather than zeros, so that reading a slot that was never written shows.
        shape = (num_pages, PAGE_SIZE, spec.num_kv_heads, width)
        return torch.full(shape, torch.nan, dtype=spec.dtype, device=self.device)

    def feed(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Append tokens to sequences in one forward pass; the logits [n,V] after each token, by sequence."""
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, ids in chunks.items():
            first = self._lengths.get(sequence, 0)
            self._lengths[sequence] = first + len(ids)
            pages = self._pages.setdefault(sequence, [])
            while len(pages) * PAGE_SIZE < self._lengths[sequence]:
                pages.append(self._free.pop())
            positions += range(first, first + len(ids))
            slots += [pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(first, first + len(ids))]
            starts.append(len(positions))
        width = max(len(self._pages[sequence]) for sequence in chunks)
        batch = ForwardBatch(
            token_ids=self._tensor([token for ids in chunks.values() for token in ids], torch.int64),
            positions=self._tensor(positions, torch.int64),
            slots=self._tensor(slots, torch.int64),
            query_starts=self._tensor(starts, torch.int32),
            context_lens=self._tensor([self._lengths[sequence] for sequence in chunks], torch.int32),
            page_tables=self._tensor(
                [self._pages[s] + [0] * (width - len(self._pages[s])) for s in chunks], torch.int32
            ),
            logits_rows=torch.arange(len(positions), device=self.device),
            kv_caches=self._caches,
        )
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model(batch)[batch.logits_rows])
        return {s: logits[starts[i] : starts[i + 1]] for i, s in enumerate(chunks)}

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def generate(self, sequence: int, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy continuation of `prompt`, one token at a time."""
        tokens: list[int] = []
        chunk = list(prompt)
        while len(tokens) < max_tokens:
            tokens.append(int(self.feed({sequence: chunk})[sequence][-1].argmax()))
            chunk = tokens[-1:]
        return tokens
