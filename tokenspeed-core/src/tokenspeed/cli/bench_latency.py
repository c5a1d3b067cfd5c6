"""`tokenspeed bench latency MODEL`: how long one batch of requests takes, from arrival to the last token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import click

from tokenspeed.cli.bench_options import count_option
from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.output import json_option, print_json, print_table
from tokenspeed.config import MACHINE, MODEL, NUMERICS, SCHEDULING, EngineConfig

PERCENTILES = (10, 25, 50, 75, 90, 99)
_NAMES = {"ttft": "time to first token", "itl": "between tokens", "latency": "whole batch"}


@click.command(cls=EngineCommand)
@engine_options(MODEL, NUMERICS, MACHINE, SCHEDULING)
@count_option("--batch-size", 1, "Requests at once.")
@count_option("--input-len", 128, "Prompt tokens.")
@count_option("--output-len", 64, "New tokens of each request.", least=2)
@count_option("--num-iters-warmup", 1, "Batches before.", least=0)
@count_option("--num-iters", 10, "Batches to measure.")
@json_option
def latency(
    config: EngineConfig,
    batch_size: int,
    input_len: int,
    output_len: int,
    num_iters_warmup: int,
    num_iters: int,
    as_json: bool,
) -> None:
    """Measure the latency of MODEL with random prompts, greedily, in this process: no HTTP is part of it."""
    from tokenspeed.cli.bench_engine import Workload
    from tokenspeed.cli.progress import Waiting, counted
    from tokenspeed.llm import LLM

    samples: dict[str, list[float]] = {"ttft": [], "itl": [], "latency": []}
    with Waiting("loading the model"):
        llm = LLM.from_config(config)
    with llm:
        workload = Workload(llm.engine)
        for _ in range(num_iters_warmup):
            workload.run(batch_size, input_len, output_len)
        for _ in counted(range(num_iters), "measuring"):
            timing = workload.run(batch_size, input_len, output_len)
            samples["ttft"] += timing.first_tokens.values()
            samples["itl"] += timing.steps[-(output_len - 1) :]
            samples["latency"].append(timing.total)
    found = {name: _summary(values) for name, values in samples.items()}
    if as_json:
        sizes = {"batch_size": batch_size, "input_len": input_len, "output_len": output_len, "num_iters": num_iters}
        print_json({"model": config.model, "numerics": config.numerics, **sizes, **found})
        return
    columns = ("", "mean ms", *(f"p{p} ms" for p in PERCENTILES))
    print_table(columns, [(_NAMES[name], *(f"{value:.2f}" for value in row.values())) for name, row in found.items()])


def _summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Mean and percentiles in milliseconds; a percentile is the smallest sample that so many do not exceed."""
    ordered = sorted(seconds)
    at = {f"p{p}_ms": ordered[min(len(ordered) - 1, -(-p * len(ordered) // 100) - 1)] * 1e3 for p in PERCENTILES}
    return {"mean_ms": statistics.fmean(ordered) * 1e3, **at}
