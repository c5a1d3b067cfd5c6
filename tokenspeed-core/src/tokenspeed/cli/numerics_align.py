"""`tokenspeed numerics align`: does the engine compute what a trainer computed?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.output import console, json_option, print_json
from tokenspeed.config import MACHINE, MODEL, NUMERICS, SCHEDULING, EngineConfig


@click.command(cls=EngineCommand)
@engine_options(MODEL, NUMERICS, MACHINE, SCHEDULING, numerics="rl-bitwise")
@click.option(
    "--dump",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="A trainer's dump.",
)
@json_option
def align(config: EngineConfig, file: Path, as_json: bool) -> None:
    """Teacher-force the sequences of a trainer's dump and compare every log-probability, bit by bit.

    The engine runs under rl-bitwise with the dump's own trainer unless told otherwise. Each sequence is computed alone
    and together with the others; what the engine reports while generating must be what it reports for given tokens.
    The first difference is located by position, module and operator when the dump holds activations. The exit status is
    1 when anything differs.
    """
    from tokenspeed.cli.progress import Waiting
    from tokenspeed.cli.verify_display import VerifyDisplay
    from tokenspeed.llm import LLM
    from tokenspeed.verify.alignment import align as compare
    from tokenspeed.verify.dump import read_dump

    found = read_dump(file)
    given = config.given
    if "numerics" not in given and "trainer" not in given:
        config = replace(config, trainer=found.trainer)
    with ExitStack() as stack:
        with Waiting("loading the model"):
            llm = stack.enter_context(LLM.from_config(config))
        found = read_dump(file, vocab_size=llm.engine.limits.vocab_size)
        display = stack.enter_context(VerifyDisplay(console(stderr=as_json)))
        report = compare(llm, found, display)
        if as_json:
            print_json(report.as_dict())
        else:
            display.finish(report)
    if not report.holds:
        raise click.exceptions.Exit(1)
