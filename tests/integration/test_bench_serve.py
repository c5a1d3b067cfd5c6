"""`tokenspeed bench serve` against a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tokenspeed.cli.bench_serve import serve as bench

VLLM_KEYS = (
    "date backend model_id num_prompts request_rate max_concurrency duration completed failed total_input_tokens "
    "total_output_tokens request_throughput request_goodput output_throughput total_token_throughput "
    "max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_tpot_ms std_itl_ms p99_e2el_ms p50_ttft_ms "
    "input_lens output_lens ttfts itls latencies start_times generated_texts errors"
)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_report_has_vllms_keys_and_adds_up(server: Any, tmp_path: Path, backend: str) -> None:
    options = f"--backend {backend} --base-url {server.url} --num-prompts 6 --random-input-len 20 --random-output-len 5"
    options += f" --ignore-eos --max-concurrency 3 --save-detailed --result-dir {tmp_path} --result-filename r.json"
    options += " --metric-percentiles 50,99 --percentile-metrics ttft,e2el --goodput ttft:100000 --metadata k=v"
    done = CliRunner().invoke(bench, options.split())
    assert done.exit_code == 0, done.output
    assert "Serving Benchmark Result" in done.output
    assert "P99 E2EL (ms)" in done.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found.keys() >= set(VLLM_KEYS.split())
    assert found["k"] == "v"
    assert found["completed"] == 6
    assert found["total_output_tokens"] == 30 == sum(found["output_lens"])
    assert found["model_id"] == "tiny-random"
    assert all(len(gaps) <= 4 for gaps in found["itls"])  # a chunk may bring several tokens


def test_failures_are_counted_and_change_the_exit_status(server: Any) -> None:
    options = f"--base-url {server.url} --model nope --num-prompts 2".split()
    done = CliRunner().invoke(bench, options)
    assert done.exit_code == 1
    assert "2 requests failed" in done.output
    assert "HTTP 404" in done.output


def test_wrong_options_are_refused() -> None:
    wrong = ["--percentile-metrics xyz", "--goodput ttft=5", "--dataset-name custom", "--metadata x"]
    wrong += ["--goodput ttft:fast", "--metric-percentiles 50,x", "--metric-percentiles 101", "--request-rate nan"]
    wrong += ["--request-rate 0", "--burstiness inf", "--temperature nan"]
    wrong += ["--save-result --result-filename /dev/null/new/x.json", "--save-result --result-filename /proc"]
    for options in wrong:
        done = CliRunner().invoke(bench, options.split())
        assert done.exit_code == 2, options
        assert "Usage: " in done.output
