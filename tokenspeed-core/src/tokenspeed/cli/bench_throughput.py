"""`tokenspeed bench throughput MODEL`: prefill and decode speed, and what of a step is the engine's own cost."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import click

from tokenspeed.cli.bench_options import count_option, size_options
from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.output import json_option, print_json, print_rich, print_table
from tokenspeed.config import MACHINE, MODEL, NUMERICS, SCHEDULING, EngineConfig

if TYPE_CHECKING:
    from tokenspeed.cli.bench_engine import Workload
    from tokenspeed.engine.engine import Engine


@click.command(cls=EngineCommand)
@engine_options(MODEL, NUMERICS, MACHINE, SCHEDULING)
@size_options(batches=(1, 4, 16, 64), input_len=128, output_len=64, prefill_len=512)
@count_option("--repeat", 3, "Runs; the median is reported.")
@click.option("--null-model", is_flag=True, help="Compute nothing: what is left is the engine's own cost.")
@json_option
def throughput(config: EngineConfig, null_model: bool, as_json: bool, **sizes: Any) -> None:
    """Measure prefill and decode speed of MODEL with random prompts, greedily, at several batch sizes.

    Decoding counts from the first token of the last request to the end. A step is split into the model with its
    operators and `engine`: scheduling, batch building, detokenisation, bookkeeping; both are medians of decode steps.
    """
    from tokenspeed.cli.bench_engine import Workload
    from tokenspeed.cli.progress import counted

    batches = sizes.pop("batches")
    workload = Workload(_engine(config, null_model, max(batches), sizes))
    workload.run(1, sizes["input_len"], 4)
    prefill = _prefill(workload, sizes["prefill_len"], sizes["repeat"])
    rows = [_decode(workload, batch, **sizes) for batch in counted(batches, "measuring batches")]
    result = {"model": config.model, "numerics": config.numerics, "null_model": null_model, **sizes, **prefill}
    if as_json:
        print_json({**result, "decode": rows})
        return
    print_rich(f"prefill {sizes['prefill_len']} tokens: {prefill['prefill_tokens_per_second']:,.0f} tokens/s")
    columns = ("batch", "decode tokens/s", "step ms", "operators ms", "engine ms")
    print_table(
        columns,
        [
            (
                str(row["batch"]),
                f"{row['decode_tokens_per_second']:,.1f}",
                f"{row['step_ms']:.3f}",
                f"{row['operator_ms']:.3f}",
                f"{row['engine_ms']:.3f}",
            )
            for row in rows
        ],
    )


def _engine(config: EngineConfig, null_model: bool, requests: int, sizes: dict[str, Any]) -> Engine:
    """The engine to measure: the model's, or one that computes nothing."""
    from tokenspeed.cli.bench_engine import null_engine
    from tokenspeed.cli.progress import Waiting
    from tokenspeed.llm import LLM

    if not null_model:
        with Waiting("loading the model"):
            return LLM.from_config(config).engine
    longest = max(sizes["prefill_len"], sizes["input_len"]) + sizes["output_len"] + 1
    return null_engine(config, max_requests=requests, longest=longest)


def _prefill(workload: Workload, length: int, repeat: int) -> dict[str, float]:
    seconds = statistics.median(workload.run(1, length, 1).total for _ in range(repeat))
    return {"prefill_tokens_per_second": length / seconds}


def _decode(
    workload: Workload, batch: int, *, input_len: int, output_len: int, repeat: int, **_: int
) -> dict[str, Any]:
    """The last steps decode the whole batch and do nothing else, since all requests are as long."""
    rates, steps, own = [], [], []
    for _run in range(repeat):
        timing = workload.run(batch, input_len, output_len)
        decoding = timing.total - max(timing.first_tokens.values())
        rates.append(batch * (output_len - 1) / decoding)
        steps += timing.steps[-(output_len - 1) :]
        own += timing.own[-(output_len - 1) :]
    step, engine = statistics.median(steps), statistics.median(own)
    return {
        "batch": batch,
        "decode_tokens_per_second": statistics.median(rates),
        "step_ms": step * 1e3,
        "operator_ms": max(step - engine, 0.0) * 1e3,
        "engine_ms": engine * 1e3,
    }
