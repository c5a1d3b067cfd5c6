"""Two ways of doing the same work, taking turns in one process: how `bench numerics` and `bench transformers` measure.

A ratio is the median over the rounds, so that a disturbance of the machine during one of them does not count; in every
second round the order of the two is exchanged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import click

from tokenspeed.cli.bench_options import Option, count_option, size_options, together
from tokenspeed.cli.options import NumberRange
from tokenspeed.cli.output import json_option, print_table
from tokenspeed.cli.progress import counted

if TYPE_CHECKING:
    from tokenspeed.cli.bench_engine import Timing
    from tokenspeed.machine import Machine


class Side(Protocol):
    """One of the two: continues `batch` random prompts of `input_len` tokens by `output_len` tokens each."""

    def run(self, batch: int, input_len: int, output_len: int) -> Timing: ...


def turn_options(*, batches: Sequence[int], input_len: int, output_len: int, prefill_len: int, rounds: int) -> Option:
    """The options of a comparison, with these defaults; the command gets them by `compare`'s names."""
    return together(
        size_options(batches=batches, input_len=input_len, output_len=output_len, prefill_len=prefill_len),
        count_option("--rounds", rounds, "How often the two take turns."),
        click.option("--at-least", type=NumberRange(0), help="Exit with status 1 when a ratio is below this."),
        json_option,
    )


def compare(
    sides: Mapping[str, Side],
    *,
    batches: Sequence[int],
    input_len: int,
    output_len: int,
    prefill_len: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """A row for the prefill of one prompt and for decoding at each batch size, after a warm-up.

    `ratio` is the speed of the second side divided by that of the first.
    """
    for side in counted(sides.values(), "warming up"):
        side.run(max(batches), input_len, 4)
    jobs = {"prefill": (1, prefill_len, 1)}
    jobs |= {f"decode, batch {batch}": (batch, input_len, output_len) for batch in batches}
    return [{"work": name, **_in_turns(sides, *job, rounds=counted(range(rounds), name))} for name, job in jobs.items()]


def print_rows(rows: Sequence[Mapping[str, Any]], sides: Mapping[str, Side]) -> None:
    """A table of what `compare` returned."""
    print_table(
        ("work", *(f"{name} tokens/s" for name in sides), "ratio", "rounds from", "to"),
        [
            (
                row["work"],
                *(f"{row[_key(name)]:,.1f}" for name in sides),
                *(f"{row[key]:.3f}" for key in ("ratio", "lowest_round", "highest_round")),
            )
            for row in rows
        ],
    )


def described(machine: Machine) -> dict[str, Any]:
    """The machine beside the numbers, for JSON."""
    return {"machine": machine.name, "isa": sorted(machine.isa), "cores": machine.cores}


def hold_to(rows: Sequence[Mapping[str, Any]], at_least: float | None) -> None:
    """Exit with status 1 when a ratio is below `at_least`."""
    lowest = min(row["ratio"] for row in rows)
    if at_least is not None and lowest < at_least:
        click.echo(f"the lowest ratio, {lowest:.3f}, is below {at_least}", err=True)
        raise click.exceptions.Exit(1)


def _in_turns(
    sides: Mapping[str, Side], batch: int, input_len: int, output_len: int, *, rounds: Iterable[int]
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in rounds:
        for name in sides if number % 2 else reversed(list(sides)):
            timing = sides[name].run(batch, input_len, output_len)
            decoding = timing.total - max(timing.first_tokens.values())
            seconds[name].append(decoding if output_len > 1 else timing.total)
    tokens = batch * (output_len - 1) if output_len > 1 else batch * input_len
    ratios = sorted(first / second for first, second in zip(*seconds.values(), strict=True))
    return {
        **{_key(name): tokens / statistics.median(taken) for name, taken in seconds.items()},
        "ratio": statistics.median(ratios),
        "lowest_round": ratios[0],
        "highest_round": ratios[-1],
    }


def _key(side: str) -> str:
    return f"{side.replace('-', '_')}_tokens_per_second"
