"""The arithmetic of `bench serve`, on requests whose times are known."""

from __future__ import annotations

import numpy as np
import pytest

from tokenspeed.cli.bench_load import Outcome, arrivals, random_prompts
from tokenspeed.cli.bench_report import percentile, percentile_name, summarise

GOOD = Outcome(started=0.0, input_tokens=10, output_tokens=3, ttft=0.5, itls=[0.1, 0.3], latency=0.9)
SLOW = Outcome(started=0.2, input_tokens=20, output_tokens=2, ttft=1.0, itls=[0.2], latency=1.2)
LOST = Outcome(started=0.0, error="EOFError")


def test_totals_count_good_requests_only() -> None:
    found = summarise([GOOD, SLOW, LOST], 2.0, ["ttft", "tpot", "itl", "e2el"], [50, 99], {"ttft": 600})
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 5)
    assert found["output_throughput"] == 2.5
    assert found["total_token_throughput"] == 17.5
    assert found["request_goodput"] == 0.5
    assert found["mean_ttft_ms"] == 750
    assert found["median_itl_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx(200)
    assert found["p50_e2el_ms"] == pytest.approx(1050)
    assert found["max_concurrent_requests"] == 2


def test_percentiles_are_numpys() -> None:
    values = [5.0, 1.0, 9.0, 3.0, 2.5]
    for p in (0, 1, 50, 90, 99, 99.9, 100):
        assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)))
    assert [percentile_name(99), percentile_name(99.9)] == ["p99", "p99.9"]


def test_arrivals_have_the_asked_rate_and_prompts_the_asked_lengths() -> None:
    assert arrivals(3, float("inf"), 1.0, 0) == [0, 0, 0]
    times = arrivals(20_000, 10.0, 0.5, 0)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000, rel=0.05)
    prompts = random_prompts(50, 100, 20, ratio=0.5, seed=1, as_text=False)
    assert {50 <= len(prompt.prompt) <= 150 for prompt in prompts} == {True}
    assert {10 <= prompt.output_tokens <= 30 for prompt in prompts} == {True}
    assert prompts == random_prompts(50, 100, 20, ratio=0.5, seed=1, as_text=False)
