"""`tokenspeed bench numerics MODEL`: what the promise costs, by two engines that do the same work in turns."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.output import print_json, print_rich, print_table
from tokenspeed.config import MACHINE, MODEL, EngineConfig

if TYPE_CHECKING:
    from tokenspeed.cli.bench_engine import Workload
    from tokenspeed.numerics.plan import Plan

PAGES = 4096
"""KV pages of each of the two engines: 64 requests of 1024 tokens."""


@click.command(cls=EngineCommand)
@engine_options(MODEL, MACHINE)
@click.option(
    "--batch-size", "batches", type=click.IntRange(1), multiple=True, help="May be repeated.  [default: 1 16]"
)
@click.option("--input-len", type=click.IntRange(1), default=64, show_default=True, help="Prompt tokens when decoding.")
@click.option("--output-len", type=click.IntRange(2), default=32, show_default=True, help="New tokens of each request.")
@click.option("--prefill-len", type=click.IntRange(1), default=256, show_default=True, help="Prompt tokens to prefill.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="How often the two take turns.")
@click.option("--at-least", type=float, help="Exit with status 1 when a ratio is below this.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def numerics(config: EngineConfig, rounds: int, at_least: float | None, as_json: bool, **sizes: Any) -> None:
    """Measure what rl-bitwise costs: its speed divided by that of auto, the two taking turns in one process.

    A ratio is the median over the rounds, so that a disturbance of the machine during one of them does not count; in
    every second round the order of the two is exchanged.
    """
    batches = sizes.pop("batches") or (1, 16)
    workloads, plans = _start(config)
    for workload in workloads.values():
        workload.run(max(batches), sizes["input_len"], 4)
    jobs = {"prefill": (1, sizes["prefill_len"], 1)}
    jobs |= {f"decode, batch {batch}": (batch, sizes["input_len"], sizes["output_len"]) for batch in batches}
    rows: list[dict[str, Any]] = [
        {"work": name, **_compare(workloads, *job, rounds=rounds)} for name, job in jobs.items()
    ]
    lowest = min(row["ratio"] for row in rows)
    if as_json:
        machine = plans["auto"].machine
        print_json(
            {
                "model": config.model,
                "machine": machine.name,
                "isa": sorted(machine.isa),
                "cores": machine.cores,
                "rounds": rounds,
                **sizes,
                "rows": rows,
                "lowest_ratio": lowest,
            }
        )
    else:
        _print(plans, rows)
    if at_least is not None and lowest < at_least:
        click.echo(f"the lowest ratio, {lowest:.3f}, is below {at_least}", err=True)
        raise click.exceptions.Exit(1)


def _start(config: EngineConfig) -> tuple[dict[str, Workload], dict[str, Plan]]:
    """An engine under each envelope, of the same sizes."""
    from tokenspeed.cli.bench_engine import Workload
    from tokenspeed.startup import launch, prepare

    workloads, plans = {}, {}
    for envelope in ("auto", "rl-bitwise"):
        longest = min(config.max_model_len or 1024, 1024)
        sized = replace(config, numerics=envelope, max_model_len=longest, num_kv_pages=PAGES, max_num_seqs=64)
        prepared = prepare(sized)
        plans[envelope] = prepared.plan
        workloads[envelope] = Workload(launch(prepared))
    return workloads, plans


def _compare(
    workloads: dict[str, Workload], batch: int, input_len: int, output_len: int, *, rounds: int
) -> dict[str, float]:
    """Tokens per second of both (medians), and the median of the rounds' ratios."""
    seconds: dict[str, list[float]] = {name: [] for name in workloads}
    for number in range(rounds):
        order = list(workloads) if number % 2 else list(reversed(workloads))
        for name in order:
            timing = workloads[name].run(batch, input_len, output_len)
            first = max(timing.first_tokens.values())
            seconds[name].append(timing.total - first if output_len > 1 else timing.total)
    tokens = batch * (output_len - 1) if output_len > 1 else batch * input_len
    pairs = zip(seconds["auto"], seconds["rl-bitwise"], strict=True)
    ratios = sorted(auto / bitwise for auto, bitwise in pairs)
    return {
        "auto_tokens_per_second": tokens / statistics.median(seconds["auto"]),
        "bitwise_tokens_per_second": tokens / statistics.median(seconds["rl-bitwise"]),
        "ratio": statistics.median(ratios),
        "lowest_round": ratios[0],
        "highest_round": ratios[-1],
    }


def _print(plans: dict[str, Plan], rows: list[dict[str, Any]]) -> None:
    plan = plans["rl-bitwise"]
    print_rich(f"{plan.model} ({plan.profile.architecture}, {plan.dtype}) on {plan.machine.describe()}")
    columns = ("work", "auto tokens/s", "rl-bitwise tokens/s", "ratio", "rounds from", "to")
    print_table(
        columns,
        [
            (
                row["work"],
                f"{row['auto_tokens_per_second']:,.1f}",
                f"{row['bitwise_tokens_per_second']:,.1f}",
                f"{row['ratio']:.3f}",
                f"{row['lowest_round']:.3f}",
                f"{row['highest_round']:.3f}",
            )
            for row in rows
        ],
    )
    kernels = {name: {spec.name for spec in plan.kernels()} for name, plan in plans.items()}
    for name, other in (("auto", "rl-bitwise"), ("rl-bitwise", "auto")):
        if only := sorted(kernels[name] - kernels[other]):
            print_rich(f"only under {name}: {', '.join(only)}")
