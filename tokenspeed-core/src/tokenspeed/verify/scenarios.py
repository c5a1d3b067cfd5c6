"""The equalities that must hold, as a table: name, statement, what must be proved to have happened, and how to test it.

What a scenario is made of is in `scenario`; the tests are in `batching_scenarios`, `context_scenarios`,
`sampling_scenarios` and `process_scenarios`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tokenspeed.verify import batching_scenarios, context_scenarios, process_scenarios, sampling_scenarios
from tokenspeed.verify.scenario import Scenario


def _table(*scenarios: Scenario) -> Mapping[str, Scenario]:
    return MappingProxyType({scenario.name: scenario for scenario in scenarios})


SCENARIOS: Mapping[str, Scenario] = _table(
    Scenario(
        "batch",
        "alone = in a batch of any size",
        {"steps above 256 tokens": 1, **{f"batch of {size}": 1 for size in batching_scenarios.BATCH_SIZES}},
        batching_scenarios.batch,
    ),
    Scenario(
        "repeat",
        "48 prompts of one length = the same again",
        {"shared steps": 1, "rounds": 2},
        batching_scenarios.repeat,
    ),
    Scenario(
        "order",
        "any order of arrival",
        {"shared steps": 1, "orders": 3, "steps of decode and prefill": 1},
        batching_scenarios.order,
    ),
    Scenario(
        "neighbours",
        "any neighbours: long, loud, repetitive, cancelled, seeded or not",
        {"steps of decode and prefill": 1, "cancelled": 6, "cached tokens": 1, "neighbours: loud": 1},
        batching_scenarios.neighbours,
    ),
    Scenario(
        "chunks",
        "whole prefill = chunks, wherever neighbours move the cut",
        {"chunked prefills": 10, "steps of decode and prefill": 1},
        context_scenarios.chunks,
    ),
    Scenario(
        "prefix",
        "cold = prefix from the cache",
        {
            "cached tokens": 1,
            "prefix lengths": 7,
            "hits as long as expected": 7,
            "other orders of the same pages": 5,
            "arrivals during a prefill": 5,
            "cancelled": 3,
        },
        context_scenarios.prefix,
    ),
    Scenario(
        "preemption",
        "uninterrupted = preempted and recomputed",
        {"preemptions": 4, "preempted for want of pages": 1},
        context_scenarios.preemption,
    ),
    Scenario(
        "prefill",
        "decode = prefill = score = prompt logprobs",
        {"teacher-forced tokens": 50, "chunked prefills": 1},
        context_scenarios.prefill,
    ),
    Scenario(
        "samples", "n samples = n requests with the derived seeds", {"different samples": 8}, sampling_scenarios.samples
    ),
    Scenario(
        "ties",
        "exact ties go to the lowest id; top-1 = greedy",
        {"exact ties": 50, "top-1 requests": 8},
        sampling_scenarios.ties,
    ),
    Scenario(
        "memory",
        "whatever lies in free pages, in fresh memory or where pages lie",
        {"dirty pages": 2, "dirty memory": 2, "scattered page tables": 1, "cancelled": 3},
        process_scenarios.memory,
    ),
    Scenario(
        "buckets",
        "decode steps as they come = padded and recorded ones (on a GPU, CUDA graphs)",
        {"padded steps": 10, "recorded steps": 20, "full buckets": 1, "dirty memory": 1},
        process_scenarios.buckets,
    ),
    Scenario("threads", "one thread = several", {"other numbers of threads": 1}, process_scenarios.threads),
    Scenario(
        "later", "first request after the start = a later one", {"requests in between": 10}, process_scenarios.later
    ),
)
"""Scenarios for an engine in this process, in the order in which they run."""
