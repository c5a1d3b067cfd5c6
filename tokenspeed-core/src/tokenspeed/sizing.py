"""How long a context may get, how many requests may run and how many KV pages there are: sizes only, never a value.

Pure functions of the options, the model's shape and the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.config import EngineConfig
from tokenspeed.errors import Problem
from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.machine import Machine

DEFAULT_KV_BYTES = 4 << 30
"""Most memory that the KV cache takes unless the user says otherwise."""

_MEMORY_SHARE = 4
"""The default never takes more than one part in so many of the machine's memory."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one engine: `num_pages` pages of 16 tokens hold at least one context of `max_model_len` tokens."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int


def choose_sizes(
    config: EngineConfig, machine: Machine, *, max_positions: int, bytes_per_page: int
) -> tuple[Sizes, tuple[Problem, ...]]:
    """Sizes that fit, and a problem for each given size that cannot.

    `max_positions` is the model's longest context in tokens, `bytes_per_page` what one page takes over all layers.
    """
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
    # A given token budget bounds how many requests can decode in one step.
    max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    num_pages = _num_pages(config, machine, bytes_per_page, enough=max_num_seqs * -(-wanted // PAGE_SIZE))
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
    return Sizes(min(wanted, room), max_num_seqs, config.max_num_batched_tokens, num_pages), tuple(problems)


def _num_pages(config: EngineConfig, machine: Machine, bytes_per_page: int, *, enough: int) -> int:
    """Pages as given; by default as many as could ever be used, within a share of the machine's memory."""
    if config.num_kv_pages is not None:
        return config.num_kv_pages
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory // bytes_per_page
    budget = DEFAULT_KV_BYTES
    if machine.memory_bytes:
        budget = min(budget, machine.memory_bytes // _MEMORY_SHARE)
    return min(enough, budget // bytes_per_page)
