"""`tokenspeed plugins`: what is installed, what each plugin registered, and what is wrong with it. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict

import click

from tokenspeed.cli.output import print_json, print_table
from tokenspeed.config_sources import allowed_plugins
from tokenspeed.plugins import PluginReport, load_plugins


@click.command()
@click.option("--plugins", "names", metavar="A,B|none", help="Load only these plugins; none loads no plugin.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(names: str | None, as_json: bool) -> None:
    """List the installed plugins: distribution, version, what each registered, status and error."""
    host = load_plugins(allowed_plugins(names))
    if as_json:
        print_json([asdict(report) for report in host.reports])
        return
    columns = ("plugin", "distribution", "version", "status", "registered")
    print_table(columns, [(r.name, r.distribution, r.version, r.status, _registered(r)) for r in host.reports])
    for report in host.reports:
        if report.error:
            click.echo(f"{report.name}: {report.error}")
        if slow := report.slowness():
            click.echo(slow)
        for waiver in report.waivers:
            click.echo(f"{report.name}: {waiver}")


def _registered(report: PluginReport) -> str:
    counts = {
        "kernels": report.kernels,
        "models": report.models,
        "trainer profiles": report.trainer_profiles,
        "commands": report.commands,
    }
    return ", ".join(f"{len(names)} {what}" for what, names in counts.items() if names) or "-"
