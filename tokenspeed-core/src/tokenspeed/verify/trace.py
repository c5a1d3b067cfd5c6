"""Where two runs of one request part: every operator call of both, row by row, until the first that differs.

A trace holds a hash of each row that an operation read or wrote for one request, by the row's position in the request.
Since a row depends only on its own and earlier positions, the first difference in the order (position, operation) is a
cause and not a consequence: everything that went into it was equal, except perhaps what lies in the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.scheduler import Schedule
from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.layers.context import Operation
from tokenspeed.layers.embedding import LMHead
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Script, request_id

INPUT, OUTPUT = 0, 1

HEAD, ENGINE = "lm_head", "engine."
"""How the call sites of an output head and of the engine itself are named."""

AFTER_FORWARD = 1 << 20
"""Calls that read logits are numbered from here."""


@dataclass(frozen=True)
class CallSite:
    """Who calls an operator, and which kernel answers."""

    module: str
    operator: str
    kernel: str

    @property
    def on_logits(self) -> bool:
        """Its rows are rows of the logits, not tokens of the batch."""
        return self.module.startswith((HEAD, ENGINE))


@dataclass(frozen=True)
class Location:
    """The first call whose row differs. `side` says whether what it read differs already, or only what it wrote.

    `cache_writers` are the kernels that fill the pages that an attention reads.
    """

    position: int
    site: CallSite
    side: int
    cache_writers: tuple[str, ...] = ()

    def describe(self) -> str:
        """`position 17, model.layers.1.mlp.down_proj (gemm.linear by acme.gemm): equal inputs, another output`."""
        where = f"position {self.position}, {self.site.module} ({self.site.operator} by {self.site.kernel})"
        if self.side == INPUT:
            return f"{where}: its input differs although every operator before it agrees; the fault lies between them"
        if self.site.operator.startswith("attention."):
            writers = ", ".join(self.cache_writers)
            return f"{where}: equal queries, another output; or other keys and values in its pages, from {writers}"
        return f"{where}: equal inputs, another output"


@dataclass
class Trace:
    """An observer of one request; `rows` maps (position, number of the call in its forward, side) to hashes seen there.

    `sites` names the calls by their number. What reads logits comes after everything in the forward, whatever its turn.
    """

    target: str
    rows: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    sites: dict[int, CallSite] = field(default_factory=dict)
    _calls: int = 0
    _flat: list[tuple[int, int]] = field(default_factory=list)
    _tokens: int = 0
    _logits: list[tuple[int, int]] = field(default_factory=list)
    _logits_rows: int = 0
    _seeds: set[tuple[int, int]] = field(default_factory=set)

    def step(self, schedule: Schedule, batch: ForwardBatch) -> None:
        """Note which rows of the batch are the target's: (row, position)."""
        self._calls = 0
        self._tokens = len(batch.token_ids)
        self._flat = []
        self._seeds = set()
        row = 0
        counts = [1] * len(schedule.decodes) + schedule.counts
        for state, count in zip((*schedule.decodes, *schedule.chunks), counts, strict=True):
            if state.id == self.target:
                self._flat += [(row + i, state.computed + i) for i in range(count)]
                self._seeds.add((state.request.seed, state.length))
            row += count

    def logits(self, rows: torch.Tensor) -> None:
        """Note which rows of the logits are the target's."""
        position = dict(self._flat)
        self._logits = [(i, position[row]) for i, row in enumerate(rows.tolist()) if row in position]
        self._logits_rows = len(rows)

    def call(self, site: CallSite, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record the target's rows of what it reads and writes."""
        number = self._number(site)
        self.sites[number] = site
        where, size = self._where(site, args)
        self._record(number, INPUT, where, size, [args[i] for i in _row_arguments(site.operator) if i < len(args)])
        result = run(*args, **kwargs)
        self._record(number, OUTPUT, where, size, result if isinstance(result, tuple) else (result,))
        return result

    def _number(self, site: CallSite) -> int:
        if site.on_logits:
            return AFTER_FORWARD + (0 if site.module.startswith(HEAD) else 1 + site.operator.endswith(".logprobs"))
        self._calls += 1
        return self._calls

    def _where(self, site: CallSite, args: tuple[Any, ...]) -> tuple[list[tuple[int, int]], int]:
        if site.operator == "sampling.sample":
            # Some rows are sampled apart (penalties), so a row is known by its seed and position.
            seeds, positions = args[5].tolist(), args[6].tolist()
            pairs = list(zip(seeds, positions, strict=True))
            return [(i, p - 1) for i, (s, p) in enumerate(pairs) if (s, p) in self._seeds], len(pairs)
        if site.on_logits:
            return self._logits, self._logits_rows
        return self._flat, self._tokens

    def _record(
        self, number: int, side: int, where: Sequence[tuple[int, int]], size: int, values: Sequence[Any]
    ) -> None:
        tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == size]
        if tensors:
            for row, position in where:
                seen = hash(tuple(_row_bytes(tensor[row]) for tensor in tensors))
                self.rows.setdefault((position, number, side), []).append(seen)


def _row_arguments(operator: str) -> list[int]:
    """Arguments that have a row for each token or each row of logits. A slot says where a row lies, not what it is."""
    arguments = OPERATORS[operator].arguments
    return [i for i, one in enumerate(arguments) if one.shape.split(",")[0] in ("T", "R") and one.role != "slots"]


def _row_bytes(row: torch.Tensor) -> bytes:
    data = row.detach().contiguous().flatten()
    return bytes(data.view(torch.uint8).cpu().numpy())


@contextmanager
def tracing(lab: Lab, trace: Trace) -> Iterator[None]:
    """Send every call of the lab's operations through `trace`; as before afterwards."""
    originals = [operation.run for operation in lab.operations]
    names = operation_names(lab)
    for operation, run in zip(lab.operations, originals, strict=True):
        site = CallSite(names[id(operation)], operation.need.operator, lab.plan.kernel(operation).name)
        operation.run = _wrapped(trace, site, run)
    try:
        yield
    finally:
        for operation, run in zip(lab.operations, originals, strict=True):
            operation.run = run


def _wrapped(trace: Trace, site: CallSite, run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: trace.call(site, run, args, kwargs)


def operation_names(lab: Lab) -> dict[int, str]:
    """The module (and attribute) that makes each call, by the operation's identity."""
    names: dict[int, str] = {}
    for path, module in lab.model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Operation):
                head = HEAD if isinstance(module, LMHead) else path
                names.setdefault(id(value), f"{head}.{attribute}" if _has_several(module) else head)
    for attribute in ("sample", "sample_edited", "logprobs"):
        names[id(getattr(lab.sampling, attribute))] = ENGINE + attribute
    return {id(operation): names.get(id(operation), "unnamed") for operation in lab.operations}


def _has_several(module: nn.Module) -> bool:
    return sum(isinstance(value, Operation) for value in vars(module).values()) > 1


def locate(lab: Lab, reference: Script, tested: Script, index: int) -> Location | None:
    """Run both scripts again, watching start 0 of `reference` and start `index` of `tested`; where they part first.

    None when they agree this time: then the difference depends on what the process did before.
    """
    expected, got = _traced(lab, reference, 0), _traced(lab, tested, index)
    for position, number, side in sorted(expected.rows.keys() & got.rows.keys()):
        key = position, number, side
        if any(seen != expected.rows[key][0] for seen in got.rows[key]):
            return Location(
                position, got.sites[number], side, (*lab.kernels("cache.write"), *lab.kernels("cache.write_latent"))
            )
    return None


def _traced(lab: Lab, script: Script, index: int) -> Trace:
    trace = Trace(request_id("v", index))
    with tracing(lab, trace):
        lab.run(script, observer=trace)
    return trace
