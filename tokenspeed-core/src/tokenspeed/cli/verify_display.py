"""A harness on the terminal: a live table while it runs, plain lines where nobody watches, and what was found."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tokenspeed.cli.progress import Heartbeat, Shown
from tokenspeed.verify.report import Report, Result

_STYLES = {
    "holds": "green",
    "differs": "bold red",
    "vacuous": "bold yellow",
    "failed": "bold red",
    "not tested": "yellow",
}


class VerifyDisplay(Shown):
    """Call it as the harness's listener. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._results: list[Result] = []
        self._running: Result | None = None
        self._live: Live | Heartbeat = (
            Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else Heartbeat()
        )

    def __call__(self, result: Result, over: bool) -> None:
        """The state of the scenario that runs."""
        self._running = None if over else result
        if over:
            self._results.append(result)
        if isinstance(self._live, Live):
            self._live.update(self._table())
            return
        self._live.say(f"{result.scenario}: {result.states}, {result.compared} replies so far")
        if over:
            self._console.print(
                f"{result.verdict:11}{result.scenario:16}{result.compared:5} replies{result.seconds:7.1f} s  "
                f"{result.states}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def finish(self, report: Report) -> None:
        """The table of all scenarios, every finding, and the verdict."""
        out = self._console
        out.print(results_table(report.results))
        for result in report.results:
            for line in explain(result):
                out.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
        out.print(f"scope        {'; '.join(report.scope)}", highlight=False, soft_wrap=True)
        if report.fingerprint:
            out.print(f"fingerprint  {report.fingerprint}", highlight=False)
        if report.result_digest:
            out.print(f"results      {report.result_digest[:16]}", highlight=False)
        bad = [result.scenario for result in report.results if result.verdict not in ("holds", "not tested")]
        untested = [result.scenario for result in report.results if result.verdict == "not tested"]
        compared = sum(result.compared for result in report.results)
        if report.holds:
            out.print(f"every equality holds: {compared} replies compared, 0 differing bits", style="bold green")
        elif compared and not bad:
            out.print(f"what could be tested holds ({compared} replies compared), but", style="yellow")
            out.print(f"NOT TESTED: {', '.join(untested)}", style="bold yellow")
        else:
            out.print(f"NOT VERIFIED: {', '.join(bad) or 'nothing was compared'}", style="bold red")

    def _table(self) -> RenderableType:
        if self._running is None:
            return results_table(self._results)
        waiting = Spinner("dots", f"{self._running.scenario}: {self._running.states}, {self._running.compared} replies")
        return Group(results_table(self._results), waiting)


def results_table(results: list[Result]) -> Table:
    """One row for each equality: how many replies and tokens were compared, and what was proved to have happened."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "equality", "replies", "tokens", "proof", "seconds"):
        is_number = column in ("replies", "tokens", "seconds")
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for result in results:
        table.add_row(
            Text(result.verdict, style=_STYLES[result.verdict]),
            f"{result.scenario}: {result.states}",
            str(result.compared),
            str(result.tokens),
            Text(_proof(result), style="dim"),
            f"{result.seconds:.1f}",
        )
    return table


def _proof(result: Result) -> str:
    """Counters, with the batch sizes in one phrase."""
    sizes = [name.removeprefix("batch of ") for name in result.proof if name.startswith("batch of ")]
    parts = [f"{result.evidence[name]} {name}" for name in result.proof if not name.startswith("batch of ")]
    if sizes and not result.missing:
        parts.append(f"batches of {', '.join(sizes)}")
    return "; ".join(parts)


def explain(result: Result) -> list[str]:
    """What is wrong with a result, for people; nothing when it holds."""
    if result.not_tested:
        return [f"{result.scenario}: not tested, {result.not_tested}"]
    lines = [f"{result.scenario}: {finding.describe()}" for finding in result.findings]
    if result.differing > len(result.findings):
        lines.append(f"{result.scenario}: {result.differing - len(result.findings)} more replies differ")
    if result.error:
        lines.append(f"{result.scenario}: {result.error}")
    if result.verdict == "vacuous":
        lines.append(f"{result.scenario}: proves nothing, since {', '.join(result.missing) or 'nothing was compared'}")
    return lines
