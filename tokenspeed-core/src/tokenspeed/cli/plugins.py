"""`tokenspeed plugins`: what is installed, what each plugin registered, and what is wrong with it. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict

import click

from tokenspeed.cli.output import json_option, print_json, print_table
from tokenspeed.config_sources import allowed_plugins
from tokenspeed.plugins import PluginReport, load_plugins


@click.command()
@click.option("--plugins", "names", metavar="A,B|none", help="Load only these plugins; none loads no plugin.")
@json_option
def plugins(names: str | None, as_json: bool) -> None:
    """List the installed plugins: distribution, version, what each registered, status and error."""
    host = load_plugins(allowed_plugins(names))
    if as_json:
        print_json([asdict(report) for report in host.reports])
        return
    columns = ("plugin", "version", "status", "registered")
    rows = [(_whose(report), report.version, report.status, _registered(report)) for report in host.reports]
    print_table(columns, rows, wrapped=("plugin", "registered"))
    for report in host.reports:
        if report.error:
            click.echo(f"{report.name}: {report.error}")
        if slow := report.slowness():
            click.echo(slow)
        for waiver in report.waivers:
            click.echo(f"{report.name}: {waiver}")


def _whose(report: PluginReport) -> str:
    """The plugin, and the distribution that brings it where that has another name."""
    return report.name if report.name == report.distribution else f"{report.name} ({report.distribution})"


def _registered(report: PluginReport) -> str:
    counts = {
        "kernels": report.kernels,
        "models": report.models,
        "trainer profiles": report.trainer_profiles,
        "commands": report.commands,
    }
    return (
        ", ".join(f"{len(names)} {what if len(names) > 1 else what[:-1]}" for what, names in counts.items() if names)
        or "-"
    )
