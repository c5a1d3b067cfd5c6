"""How long a context may get, how many requests may run and how many KV pages there are: sizes only, never a value.

Pure functions of the options, the model's shape and the machine.

On a GPU the KV cache gets what is free once everything else has its place: the weights twice (new ones are read beside
the old ones), what one step computes, and a share that stays empty for CUDA's own needs and for fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenspeed.config import EngineConfig
from tokenspeed.errors import Problem
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.kernels.spec import Need
from tokenspeed.machine import Machine

DEFAULT_KV_BYTES = 4 << 30
"""Most memory that the KV cache takes unless the user says otherwise."""

_MEMORY_SHARE = 4
"""The default never takes more than one part in so many of the machine's memory."""


_GPU_RESERVE = 0.08
"""Share of a GPU's memory that nothing plans with: context, compiled kernels, recorded graphs, fragmentation."""

SMALLER = "free memory, or give a smaller --kv-cache-memory, --max-num-batched-tokens or --max-num-seqs"
"""What to do about memory that is full."""

_ATTENTION_WORKSPACE = 64 << 20
"""Most that attention kernels of ours keep for partial results."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device beside the KV cache: the weights, and what a step holds at the same time, estimated."""

    weights: int = 0
    step: int = 0

    @classmethod
    def of(cls, weights: int, needs: Iterable[Need], *, tokens: int, rows: int, vocabulary: int) -> Footprint:
        """From the projections of a model: the widest input and output twice, fp32 at worst, and the logits twice.

        `tokens` is the largest step, `rows` the most rows of logits. It is an estimate to plan with, not a measurement.
        """
        shapes = [dict(need.facts) for need in needs if need.operator == "gemm.linear"]
        widths = [int(f["k"]) + int(f["n"]) for f in shapes if "k" in f and "n" in f and f["n"] != vocabulary]
        return cls(weights, tokens * 2 * max(widths, default=0) * 4 + rows * vocabulary * 8 + _ATTENTION_WORKSPACE)

    @property
    def total(self) -> int:
        """With room for a second set of weights."""
        return 2 * self.weights + self.step


@dataclass(frozen=True)
class Sizes:
    """The sizes of one engine: `num_pages` pages of 16 tokens hold at least one context of `max_model_len` tokens."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int


def seats_and_budget(config: EngineConfig) -> tuple[int, int]:
    """Most requests that run at once, and most tokens of a step. A default gives way to what was given.

    Every request that decodes takes one token of each step, so the budget must reach the number of seats.
    """
    seats, budget = config.max_num_seqs, config.max_num_batched_tokens
    if "max_num_batched_tokens" not in config.given:
        budget = max(budget, seats)
    elif "max_num_seqs" not in config.given:
        seats = min(seats, budget)
    return seats, budget


def choose_sizes(
    config: EngineConfig,
    machine: Machine,
    *,
    max_positions: int,
    bytes_per_page: int,
    footprint: Footprint | None = None,
) -> tuple[Sizes, tuple[Problem, ...]]:
    """Sizes that fit, and a problem for each given size that cannot.

    `max_positions` is the model's longest context in tokens, `bytes_per_page` what one page takes over all layers,
    `footprint` what else takes memory; it matters on a GPU only.
    """
    footprint = footprint or Footprint()
    problems = []
    wanted = config.max_model_len or max_positions
    if wanted > max_positions:
        problems.append(
            Problem(
                "size",
                f"--max-model-len {wanted} was given, and the model's longest context is {max_positions} tokens",
                remedy=f"give at most {max_positions}",
            )
        )
        wanted = max_positions
    max_num_seqs, budget = seats_and_budget(config)
    if max_num_seqs > budget:
        problems.append(
            Problem(
                "size",
                f"--max-num-seqs {max_num_seqs} and --max-num-batched-tokens {budget} were given, "
                "and each request that runs takes a token of every step",
                remedy="give no more requests than tokens, or only one of the two",
            )
        )
    enough = max_num_seqs * -(-wanted // PAGE_SIZE)
    num_pages = _num_pages(config, machine, bytes_per_page, footprint, enough=enough)
    if machine.gpu_free_bytes and (fault := _gpu_fault(machine, footprint, num_pages, bytes_per_page)):
        return Sizes(wanted, max_num_seqs, budget, num_pages), (*problems, fault)
    if not machine.gpu_free_bytes and 0 < machine.memory_bytes < num_pages * bytes_per_page:
        problems.append(
            Problem(
                "memory",
                f"a KV cache of {num_pages} pages takes {_gib(num_pages * bytes_per_page)}, and this machine has "
                f"{_gib(machine.memory_bytes)} of memory",
                remedy="give a smaller --kv-cache-memory or --num-kv-pages",
            )
        )
    room = num_pages * PAGE_SIZE
    if room < wanted and config.max_model_len is not None:
        needed = -(-wanted // PAGE_SIZE) * bytes_per_page
        problems.append(
            Problem(
                "size",
                f"--max-model-len {wanted} needs {needed / 2**30:.2f} GiB of KV cache, "
                f"and there are {num_pages * bytes_per_page / 2**30:.2f} GiB ({room} tokens)",
                remedy="give a larger --kv-cache-memory or --num-kv-pages, or a smaller --max-model-len",
            )
        )
    elif not num_pages:
        problems.append(
            Problem(
                "size",
                f"the KV cache has no page: one page of {PAGE_SIZE} tokens takes {bytes_per_page} bytes",
                remedy="give a larger --kv-cache-memory",
            )
        )
    return Sizes(min(wanted, room), max_num_seqs, budget, num_pages), tuple(problems)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _num_pages(
    config: EngineConfig, machine: Machine, bytes_per_page: int, footprint: Footprint, *, enough: int
) -> int:
    """Pages as given; by default as many as could ever be used, within what the machine or its GPU has for them."""
    if config.num_kv_pages is not None:
        return config.num_kv_pages
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory // bytes_per_page
    if machine.gpu_free_bytes:
        return max(min(enough, (_plannable(machine) - footprint.total) // bytes_per_page), 0)
    budget = DEFAULT_KV_BYTES
    if machine.memory_bytes:
        budget = min(budget, machine.memory_bytes // _MEMORY_SHARE)
    return min(enough, budget // bytes_per_page)


def _plannable(machine: Machine) -> int:
    """Bytes of GPU memory to plan with."""
    return machine.gpu_free_bytes - int(machine.gpu_memory_bytes * _GPU_RESERVE)


def _gpu_fault(machine: Machine, footprint: Footprint, num_pages: int, bytes_per_page: int) -> Problem | None:
    """Why a GPU cannot hold so many pages beside the rest, in numbers. The second set of weights may be given up."""
    cache = max(num_pages, 1) * bytes_per_page
    if footprint.weights + footprint.step + cache <= _plannable(machine):
        return None

    reserve = machine.gpu_memory_bytes * _GPU_RESERVE
    return Problem(
        "memory",
        f"the GPU has {_gib(machine.gpu_free_bytes)} free of {_gib(machine.gpu_memory_bytes)}, which is too little",
        (
            f"weights {_gib(footprint.weights)}",
            f"a step of the largest size, estimated: {_gib(footprint.step)}",
            f"KV cache of {max(num_pages, 1)} pages: {_gib(cache)}",
            f"kept empty: {_gib(reserve)}",
        ),
        SMALLER,
    )
