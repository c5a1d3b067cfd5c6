"""`tokenspeed kernels verify`: the conformance kit from the command line, without pytest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tokenspeed.cli.output import json_option, print_json, print_table, unwritable
from tokenspeed.config_sources import allowed_plugins
from tokenspeed.errors import ConfigError
from tokenspeed.machine import Machine, read_machine
from tokenspeed.plugins import PluginHost, load_plugins
from tokenspeed.testing.names import CHECKS, KIT_VERSION

if TYPE_CHECKING:
    from tokenspeed.kernels.spec import KernelSpec
    from tokenspeed.testing.verify import KernelReport

DEFAULT_FOLDER = "kernel-faults"

_OUTCOMES = ("passed", "failed", "waived", "not claimed")


@click.command()
@click.option("--plugin", "plugin", metavar="NAME", help="Only the kernels of this plugin or distribution.")
@click.option("--kernel", "kernel", metavar="NAME", help="Only this kernel.")
@click.option("--check", "only", multiple=True, type=click.Choice(list(CHECKS)), help="Only this check. Repeatable.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to run.")
@click.option("--faults", "folder", metavar="DIR", default=DEFAULT_FOLDER, help="Where failing inputs are saved.")
@click.option("--replay", "replayed", metavar="FILE", help="Run a saved failing input again, and nothing else.")
@click.option("--plugins", "names", metavar="A,B|none", help="Load only these plugins; none loads no plugin.")
@json_option
def verify(
    plugin: str | None,
    kernel: str | None,
    only: tuple[str, ...],
    device: str,
    folder: str,
    replayed: str | None,
    names: str | None,
    as_json: bool,
) -> None:
    """Prove what the kernels declare: agreement with the reference, and every feature and trait.

    Each failure is made small and saved as a file that --replay runs again. A kernel that this machine cannot run is
    listed with the reason and proves nothing; when it was asked for by name, that is a failure. The exit status is 1
    when anything failed.
    """
    host = load_plugins(allowed_plugins(names))
    if replayed is not None:
        _replay(Path(replayed), host)
        return
    chosen = _chosen(host, plugin, kernel)
    if fault := unwritable(Path(folder) / "fault", makes_folders=True):
        raise ConfigError(f"--faults {folder}: {fault}")
    reports = _run(chosen, host, read_machine(device), only)
    saved = _save(reports, Path(folder))
    if as_json:
        print_json({"kit": KIT_VERSION, "kernels": [report.as_dict() for report in reports], "saved": saved})
    else:
        _show(reports, saved)
    if any(report.verdict == "failed" or (kernel and report.not_run) for report in reports):
        raise click.exceptions.Exit(1)


def _chosen(host: PluginHost, plugin: str | None, kernel: str | None) -> list[KernelSpec]:
    """The kernels to verify. Raises ConfigError for a name that is not installed, or a plugin that is broken."""
    specs = list(host.kernels())
    if plugin is not None:
        reports = [report for report in host.reports if plugin in (report.name, report.distribution)]
        if not reports:
            installed = ", ".join(report.name for report in host.reports)
            raise ConfigError(f"--plugin: {plugin} is not installed; installed: {installed}")
        if broken := [report for report in reports if report.status != "ok"]:
            raise ConfigError("\n".join(f"--plugin: {report.describe()}" for report in broken))
        theirs = {name for report in reports for name in report.kernels}
        specs = [spec for spec in specs if spec.name in theirs]
    if kernel is not None:
        specs = [spec for spec in specs if spec.name == kernel]
        if not specs:
            raise ConfigError(f"--kernel: {kernel} is not installed; `tokenspeed kernels` lists what is")
    return sorted(specs, key=lambda spec: (spec.distribution, spec.operator, spec.name))


def _run(specs: list[KernelSpec], host: PluginHost, machine: Machine, only: tuple[str, ...]) -> list[KernelReport]:
    from tokenspeed.cli.progress import Doing
    from tokenspeed.testing.verify import verify_kernel

    others = host.kernels()
    with Doing() as doing:

        def tell(spec: KernelSpec, check: str) -> None:
            doing(f"{spec.name}: {check}")

        return [verify_kernel(spec, machine, others, only=only, listener=tell) for spec in specs]


def _save(reports: list[KernelReport], folder: Path) -> list[str]:
    from tokenspeed.testing.reproduce import save_fault

    paths = (save_fault(folder, report.spec, result) for report in reports for result in report.failures)
    return [str(path) for path in paths if path is not None]


def _show(reports: list[KernelReport], saved: list[str]) -> None:
    ran = [report for report in reports if not report.not_run]
    if ran:
        print_table(("", "kernel", "passed", "else", "seconds"), [_row(report) for report in ran], wrapped=("else",))
    for report in reports:
        for result in report.results:
            if result.outcome in ("failed", "waived"):
                click.echo(f"\n{report.spec.name}: {result.check} {result.outcome}: {result.reason}")
                if result.fault and result.fault.recipe:
                    click.echo(f"  inputs: {result.fault.recipe.describe()}")
    for path in saved:
        click.echo(f"\nsaved {path}; run it again with `tokenspeed kernels verify --replay {path}`")
    skipped: dict[str, list[str]] = {}
    for report in reports:
        if report.not_run:
            skipped.setdefault(report.not_run, []).append(report.spec.name)
    for reason, kernels in skipped.items():
        click.echo(f"\nnot run, {reason}: {', '.join(kernels)}")
    failed = sum(report.verdict == "failed" for report in ran)
    skips = len(reports) - len(ran)
    click.echo(f"\n{len(ran) - failed} passed, {failed} failed, {skips} not run (kit {KIT_VERSION})")


def _row(report: KernelReport) -> tuple[str, ...]:
    """How many checks passed, and what became of the others, by name."""
    names = {outcome: [r.check for r in report.results if r.outcome == outcome] for outcome in _OUTCOMES}
    others = "; ".join(f"{outcome}: {', '.join(names[outcome])}" for outcome in _OUTCOMES[1:] if names[outcome])
    verdict = "ok" if report.verdict == "passed" else "FAILED"
    return (verdict, report.spec.name, str(len(names["passed"])), others, f"{report.seconds:.1f}")


def _replay(path: Path, host: PluginHost) -> None:
    from tokenspeed.testing.reproduce import replay

    if not path.is_file():
        raise ConfigError(f"--replay: there is no file {path}")
    spec, difference = replay(path, host.kernels())
    if difference is None:
        click.echo(f"{spec.name} ({spec.distribution} {spec.version}): the fault is gone")
        return
    click.echo(f"{spec.name} ({spec.distribution} {spec.version}): {difference}")
    raise click.exceptions.Exit(1)
