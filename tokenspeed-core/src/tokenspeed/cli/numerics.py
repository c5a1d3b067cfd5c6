"""`tokenspeed numerics`: what is promised about bits, and whether it holds."""

from __future__ import annotations

import click

from tokenspeed.cli.commands import NUMERICS_COMMANDS
from tokenspeed.cli.lazy import LazyGroup
from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.output import json_option, print_json, print_rich
from tokenspeed.config import MACHINE, NUMERICS, EngineConfig
from tokenspeed.errors import problem_dict


@click.group(cls=LazyGroup, lazy=NUMERICS_COMMANDS)
def numerics() -> None:
    """Explain and check what is promised about bits."""


@click.command(cls=EngineCommand)
@engine_options(NUMERICS, MACHINE)
@json_option
def explain(config: EngineConfig, as_json: bool) -> None:
    """Show what each switch became and why, for the options given here, in a file and in the environment.

    The exit status is 2 when the options contradict the envelope. `tokenspeed explain MODEL` shows the kernels.
    """
    from tokenspeed.machine import choose_device
    from tokenspeed.numerics.card import switches_table
    from tokenspeed.numerics.resolve import resolve
    from tokenspeed.plugins import load_plugins

    host = load_plugins(config.plugins)
    resolution = resolve(
        config.numerics,
        config.trainer,
        config.switches,
        sources=config.given,
        profiles=host.trainer_profiles(),
        kernels=host.kernels(),
        device=choose_device(config.device),
    )
    found = resolution.numerics
    if as_json:
        print_json({**found.as_dict(), "problems": [problem_dict(problem) for problem in resolution.problems]})
    else:
        promises = ", ".join(found.promises) or "nothing"
        trainer = f", trainer {found.trainer}" if found.trainer else ""
        click.echo(f"{found.envelope}{trainer}: promises {promises}\n")
        print_rich(switches_table(found))
        for problem in resolution.problems:
            click.echo(problem.render(), err=True)
    if resolution.problems:
        raise click.exceptions.Exit(2)
