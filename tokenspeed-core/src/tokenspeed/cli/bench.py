"""`tokenspeed bench`: a group of measurements, each in a module of its own."""

from __future__ import annotations

import click

from tokenspeed.cli.commands import BENCH_COMMANDS
from tokenspeed.cli.lazy import LazyGroup


@click.group(cls=LazyGroup, lazy=BENCH_COMMANDS)
def bench() -> None:
    """Measure throughput and latency."""
