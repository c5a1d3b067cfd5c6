"""`tokenspeed explain MODEL`: the plan, every candidate and every reason, for this machine or a made-up one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.output import json_option, print_json, print_rich
from tokenspeed.config import MACHINE, MODEL, NUMERICS, EngineConfig
from tokenspeed.machine import named_machine

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tokenspeed.startup import Examination


@click.command(cls=EngineCommand)
@engine_options(MODEL, NUMERICS, MACHINE)
@click.option("--machine", metavar="NAME", help="Plan for a made-up machine: cpu, cpu-avx2, cpu-avx512_bf16, sm90, …")
@json_option
def explain(config: EngineConfig, machine: str | None, as_json: bool) -> None:
    """Show which kernel would serve each operator of MODEL, and why every other one would not.

    Needs only the model's config.json, no weights. The exit status is 2 when a start would be refused.
    """
    from tokenspeed.startup import examine

    found = examine(config, named_machine(machine) if machine else None, weights=False)
    if as_json:
        print_json(_as_dict(found))
    else:
        print_rich(*_report(found))
    if found.problems:
        if not as_json:
            click.echo("A start would be refused:\n", err=True)
            click.echo("\n".join(problem.render() for problem in found.problems), err=True)
        raise click.exceptions.Exit(2)


def _as_dict(found: Examination) -> dict[str, object]:
    from tokenspeed.errors import problem_dict
    from tokenspeed.numerics.plan import machine_dict, operators_dict

    return {
        "model": found.config.model,
        "architecture": found.profile.architecture if found.profile else None,
        "machine": machine_dict(found.machine),
        "numerics": found.numerics.as_dict(),
        "links": dict(found.selection.links) if found.selection else {},
        "operators": operators_dict(found.selection.choices, found.selection.verdicts) if found.selection else [],
        "decode_graphs": found.recording.as_dict() if found.recording else None,
        "notes": list(found.host.notes()),
        "problems": [problem_dict(problem) for problem in found.problems],
    }


def _report(found: Examination) -> list[RenderableType]:
    from rich.text import Text
    from rich.tree import Tree

    from tokenspeed.kernels.refusals import alike

    architecture = found.profile.architecture if found.profile else "unknown architecture"
    trainer = f", trainer {found.numerics.trainer}" if found.numerics.trainer else ""
    parts: list[RenderableType] = [
        Text(f"{found.config.model} ({architecture}) on {found.machine.describe()}, {found.numerics.envelope}{trainer}")
    ]
    if found.selection is None:
        return parts
    for group in alike(found.selection.verdicts, found.selection.verdicts):
        need = group[0]
        chosen = found.selection.choices.get(need)
        shapes = f", {len(group)} shapes" if len(group) > 1 else ""
        head = Text.assemble(need.describe() if len(group) == 1 else need.without_facts().describe(), shapes, " -> ")
        head.append(chosen.name if chosen else "no kernel", style="bold green" if chosen else "bold red")
        tree = Tree(head)
        for verdict in found.selection.verdicts[need]:
            style = "green" if verdict.spec is chosen else "" if verdict.accepted else "dim"
            tree.add(Text(verdict.describe(), style=style))
        parts.append(tree)
    if found.recording is not None and found.machine.device == "cuda":
        parts.append(Text(found.recording.describe()))
    parts += [Text(f"note: {note}", style="yellow") for note in found.host.notes()]
    return parts
