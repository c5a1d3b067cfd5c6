"""The numbers of `bench serve`, under vLLM's JSON keys, which plotting scripts consume."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.cli.bench_load import Outcome


def summarise(
    outcomes: Sequence[Outcome],
    seconds: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Throughput over `seconds`, and mean, median, standard deviation and percentiles of each metric, in milliseconds.

    `goodput` maps a metric to the milliseconds that a good request keeps.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    inputs, outputs = sum(o.input_tokens for o in good), sum(o.output_tokens for o in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_keeps(o, goodput) for o in good) / seconds if goodput else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_concurrency(good),
    }
    for name in metrics:
        values = [1000 * value for outcome in good for value in _values(outcome, name)] or [0.0]
        result |= {
            f"mean_{name}_ms": statistics.fmean(values),
            f"median_{name}_ms": statistics.median(values),
            f"std_{name}_ms": statistics.pstdev(values),
        }
        result |= {f"{percentile_name(p)}_{name}_ms": percentile(values, p) for p in percentiles}
    return result


def percentile_name(p: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{p:g}"


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile with linear interpolation, as numpy's default computes it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _values(outcome: Outcome, name: str) -> list[float]:
    """Seconds: one value for a request, or one for each gap between tokens."""
    match name:
        case "ttft":
            return [outcome.ttft]
        case "itl":
            return outcome.itls
        case "e2el":
            return [outcome.latency]
        case _:
            rest = outcome.output_tokens - 1
            return [(outcome.latency - outcome.ttft) / rest] if rest > 0 else []


def _keeps(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    return all(1000 * value <= most for name, most in goodput.items() for value in _values(outcome, name))


def _peak_tokens(outcomes: Sequence[Outcome]) -> float:
    """Most tokens that arrived within one second of the run, counted in whole seconds."""
    buckets: dict[int, int] = {}
    for outcome in outcomes:
        at = outcome.started + outcome.ttft
        for gap in (0.0, *outcome.itls):
            at += gap
            buckets[int(at)] = buckets.get(int(at), 0) + 1
    return float(max(buckets.values(), default=0))


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    changes = [(o.started, 1) for o in outcomes] + [(o.started + o.latency, -1) for o in outcomes]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
