"""`tokenspeed kernels`: the installed kernels, by operator. Listing imports no kernel and no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import click

from tokenspeed.cli.commands import KERNELS_COMMANDS
from tokenspeed.cli.lazy import LazyGroup
from tokenspeed.cli.output import json_option, print_facts, print_json, print_table
from tokenspeed.config_sources import allowed_plugins
from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import spell_priority
from tokenspeed.kernels.spec import KernelSpec, spell_values
from tokenspeed.plugins import load_plugins

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


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
@json_option
def list_kernels(operator: str | None, names: str | None, as_json: bool) -> None:
    """List the installed kernels, or those of one OPERATOR: what each needs, declares and follows."""
    if operator is not None and operator not in OPERATORS:
        raise click.UsageError(f"{operator!r} is not an operator; the operators are {', '.join(OPERATORS)}")
    registry = KernelRegistry.from_plugins(load_plugins(allowed_plugins(names)))
    specs = list(registry) if operator is None else list(registry.for_operator(operator))
    if as_json:
        print_json([spec_dict(spec) for spec in specs])
        return
    if operator is None:
        _print_all(specs)
    else:
        for spec in specs:
            _print_one(spec)
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


def _print_all(specs: list[KernelSpec]) -> None:
    rows: list[tuple[str, ...]] = []
    for name, kernels in groupby(specs, key=lambda spec: spec.operator):
        rows.append((name, "", "", ""))
        rows += [(f"  {spec.name}", _place(spec), _dtypes(spec), ", ".join(sorted(spec.features))) for spec in kernels]
    print_table(("kernel", "runs on", "dtypes", "features"), rows, wrapped=("runs on", "dtypes"))
    click.echo("\n`tokenspeed kernels OPERATOR` shows who brings each kernel and all that it declares.")


def _print_one(spec: KernelSpec) -> None:
    needs = spec.machine
    traits = [f"{name} {spell_values(values)}" for name, values in sorted(spec.traits.items())]
    facts = {
        "from": f"{spec.distribution} {spec.version}, priority {spell_priority(spec.priority)}",
        "needs": ", ".join([needs.device, *_natural(needs.arch), *sorted(needs.isa), *sorted(needs.libraries)]),
        "dtypes": "; ".join(dict.fromkeys(map(_signature, spec.signatures))),
        "features": ", ".join(sorted(spec.features)),
        "traits": "; ".join(traits),
        "bit order": spec.bit_order or "",
        "waived": "; ".join(f"{check} ({reason})" for check, reason in spec.waivers.items()),
    }
    click.secho(spec.name, bold=True)
    print_facts({name: fact for name, fact in facts.items() if fact})


def _place(spec: KernelSpec) -> str:
    """The device, with the architectures from the oldest to the newest."""
    arch = _natural(spec.machine.arch)
    return " ".join([spec.machine.device, *([arch[0] if len(arch) == 1 else f"{arch[0]}…{arch[-1]}"] if arch else [])])


def _natural(names: Iterable[str]) -> list[str]:
    """`sm90` before `sm100`."""
    return sorted(names, key=lambda name: (len(name), name))


def _dtypes(spec: KernelSpec) -> str:
    short = ("/".join(_SHORT.get(name, name) for name in dict.fromkeys(each.values())) for each in spec.signatures)
    return " ".join(sorted({name or "-" for name in short}))


def _signature(signature: Mapping[str, str]) -> str:
    """`x, weight bfloat16`."""
    by_dtype: dict[str, list[str]] = {}
    for role, dtype in signature.items():
        by_dtype.setdefault(dtype, []).append(role)
    return ", ".join(f"{'/'.join(roles)} {dtype}" for dtype, roles in by_dtype.items())
