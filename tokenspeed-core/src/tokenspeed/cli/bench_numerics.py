"""`tokenspeed bench numerics MODEL`: what the promise costs, by two engines that do the same work in turns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from tokenspeed.cli.bench_turns import compare, described, hold_to, print_rows, turn_options
from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.output import print_json, print_rich
from tokenspeed.config import MACHINE, MODEL, EngineConfig

if TYPE_CHECKING:
    from tokenspeed.cli.bench_engine import Workload
    from tokenspeed.numerics.plan import Plan

PAGES = 4096
"""KV pages of each of the two engines: 64 requests of 1024 tokens."""


@click.command(cls=EngineCommand)
@engine_options(MODEL, MACHINE)
@turn_options(batches=(1, 16), input_len=64, output_len=32, prefill_len=256, rounds=7)
def numerics(config: EngineConfig, at_least: float | None, as_json: bool, **work: Any) -> None:
    """Measure what rl-bitwise costs: its speed divided by that of auto, the two taking turns in one process.

    A ratio is the median over the rounds, so that a disturbance of the machine during one of them does not count; in
    every second round the order of the two is exchanged.
    """
    workloads, plans = _start(config)
    rows = compare(workloads, **work)
    if as_json:
        print_json({"model": config.model, **described(plans["auto"].machine), **work, "rows": rows})
    else:
        plan = plans["rl-bitwise"]
        print_rich(f"{plan.model} ({plan.profile.architecture}, {plan.dtype}) on {plan.machine.describe()}")
        print_rows(rows, workloads)
        kernels = {name: {spec.name for spec in plan.kernels()} for name, plan in plans.items()}
        for name, other in (("auto", "rl-bitwise"), ("rl-bitwise", "auto")):
            if only := sorted(kernels[name] - kernels[other]):
                print_rich(f"only under {name}: {', '.join(only)}")
    hold_to(rows, at_least)


def _start(config: EngineConfig) -> tuple[dict[str, Workload], dict[str, Plan]]:
    """An engine under each envelope, of the same sizes."""
    from tokenspeed.cli.bench_engine import Workload
    from tokenspeed.cli.progress import loading
    from tokenspeed.startup import launch, prepare

    workloads, plans = {}, {}
    for envelope in ("auto", "rl-bitwise"):
        prepared = prepare(replace(config, numerics=envelope, num_kv_pages=PAGES, max_num_seqs=64))
        plans[envelope] = prepared.plan
        with loading() as progress:
            workloads[envelope] = Workload(launch(prepared, progress))
    return workloads, plans
