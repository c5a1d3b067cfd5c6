"""The plan as a card in the terminal. Presentation only; imports rich."""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tokenspeed.numerics.plan import Plan
    from tokenspeed.numerics.resolve import ResolvedNumerics

WIDTH = 120
"""Columns that a card takes at most."""


def plan_card(plan: Plan) -> RenderableType:
    """Model, machine and envelope in the head, then operators and kernels, then the switches that are not default."""
    head = Text.assemble(
        ("model     ", "dim"),
        f"{plan.model} ({plan.profile.architecture}, {plan.dtype})\n",
        ("machine   ", "dim"),
        f"{plan.machine.describe()}\n",
        ("numerics  ", "dim"),
        (plan.numerics.envelope, "bold"),
        f" (trainer {plan.numerics.trainer})" if plan.numerics.trainer else " (nothing is promised)",
        "\n",
        ("digest    ", "dim"),
        plan.digest[:16],
    )
    parts: list[RenderableType] = [head, _kernels(plan)]
    if tight := _set_switches(plan.numerics):
        parts.append(Text.assemble(("switches  ", "dim"), tight))
    parts += [Text(f"note: {note}", style="yellow") for note in plan.notes]
    return Panel(Group(*parts), title="tokenspeed plan", title_align="left", expand=False)


def as_text(renderable: RenderableType) -> str:
    """A card as plain text, for logs and for the process that prints it; no wider than the terminal, where one is."""
    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def switches_table(numerics: ResolvedNumerics) -> Table:
    """Every switch with its value and the reason for it."""
    table = Table(box=None, pad_edge=False)
    for column in ("switch", "value", "why"):
        table.add_column(column, no_wrap=column != "why")
    for name, value in numerics.switches.items():
        reason = numerics.reasons[name]
        table.add_row(name, value, reason, style=None if reason.startswith(("required", "given")) else "dim")
    return table


def _kernels(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("operator", "kernel", "distribution", "bit order"):
        table.add_column(column, overflow="fold")
    rows = {
        (need.operator, spec.name, f"{spec.distribution} {spec.version}", spec.bit_order or "-")
        for need, spec in plan.choices.items()
    }
    for row in sorted(rows):
        table.add_row(*row)
    return table


def _set_switches(numerics: ResolvedNumerics) -> str:
    return ", ".join(
        f"{name}={value}"
        for name, value in numerics.switches.items()
        if not numerics.reasons[name].startswith("default")
    )
