"""`tokenspeed kernels`: the installed kernels, by operator. Listing imports no kernel and no torch."""

from __future__ import annotations

from typing import Any

import click

from tokenspeed.cli.commands import KERNELS_COMMANDS
from tokenspeed.cli.lazy import LazyGroup
from tokenspeed.cli.output import print_json, print_table
from tokenspeed.config_sources import allowed_plugins
from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import spell_priority
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.plugins import load_plugins


class _ListByDefault(LazyGroup):
    """A group whose first member is meant when the first word names none: `tokenspeed kernels gemm.linear`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `list` before what is no subcommand and no call for help."""
        if not args or (args[0] not in self.list_commands(ctx) and args[0] not in ("-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault, lazy=KERNELS_COMMANDS)
def kernels() -> None:
    """List the installed kernels, or prove what they claim.

    `tokenspeed kernels` alone, or with the name of an operator, lists.
    """


@click.command(name="list")
@click.argument("operator", required=False)
@click.option("--plugins", "names", metavar="A,B|none", help="Load only these plugins; none loads no plugin.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_kernels(operator: str | None, names: str | None, as_json: bool) -> None:
    """List the installed kernels, or those of one OPERATOR: what each needs, declares and follows."""
    if operator is not None and operator not in OPERATORS:
        raise click.UsageError(f"{operator!r} is not an operator; the operators are {', '.join(OPERATORS)}")
    registry = KernelRegistry.from_plugins(load_plugins(allowed_plugins(names)))
    specs = list(registry) if operator is None else list(registry.for_operator(operator))
    if as_json:
        print_json([spec_dict(spec) for spec in specs])
        return
    columns = (
        "operator",
        "kernel",
        "distribution",
        "priority",
        "machine",
        "dtypes",
        "features and traits",
        "bit order",
    )
    print_table(columns, [_row(spec) for spec in specs], wrapped=("dtypes", "features and traits"))
    if registry.unavailable:
        click.echo("\nNot considered:")
        for report in registry.unavailable:
            click.echo(f"  {report.describe()}")


def spec_dict(spec: KernelSpec) -> dict[str, Any]:
    """A spec as plain data with sorted sets."""
    return {
        "name": spec.name,
        "operator": spec.operator,
        "solution": spec.solution,
        "distribution": spec.distribution,
        "version": spec.version,
        "implementation": spec.implementation,
        "prepare_weights": spec.prepare_weights,
        "machine": {
            "device": spec.machine.device,
            "arch": sorted(spec.machine.arch),
            "isa": sorted(spec.machine.isa),
            "libraries": sorted(spec.machine.libraries),
        },
        "signatures": [dict(signature) for signature in spec.signatures],
        "features": sorted(spec.features),
        "traits": {name: sorted(values, key=str) for name, values in sorted(spec.traits.items())},
        "priority": spell_priority(spec.priority),
        "bit_order": spec.bit_order,
        "waivers": dict(spec.waivers),
    }


def _row(spec: KernelSpec) -> tuple[str, ...]:
    needs = spec.machine
    machine = " ".join([needs.device, *sorted(needs.arch), *sorted(needs.isa), *sorted(needs.libraries)])
    dtypes = sorted({"/".join(dict.fromkeys(signature.values())) or "-" for signature in spec.signatures})
    traits = [f"{name}={'|'.join(sorted(map(str, values)))}" for name, values in sorted(spec.traits.items())]
    return (
        spec.operator,
        spec.name,
        f"{spec.distribution} {spec.version}",
        spell_priority(spec.priority),
        machine,
        ", ".join(dtypes),
        ", ".join([*sorted(spec.features), *traits]) or "-",
        spec.bit_order or "-",
    )
