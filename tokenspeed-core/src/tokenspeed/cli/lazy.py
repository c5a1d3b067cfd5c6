"""A command group whose members are imported only when they are invoked."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import click

from tokenspeed.cli.commands import LazyCommand


class LazyGroup(click.Group):
    """A group made from a table of `LazyCommand`. Its help reads the table, so listing imports nothing."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return [*self._lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None when there is none of that name."""
        lazy = self._lazy.get(cmd_name)
        if lazy is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = lazy.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with the nearest name when there is no such command."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            ctx.fail(f"no such command {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The commands with their summaries."""
        _write_section(formatter, "Commands", [(name, lazy.summary) for name, lazy in self._lazy.items()])


def _write_section(formatter: click.HelpFormatter, title: str, rows: Iterable[tuple[str, str]]) -> None:
    if rows := list(rows):
        with formatter.section(title):
            formatter.write_dl(rows)


class PluginGroup(LazyGroup):
    """A lazy group that plugins may add commands to. Plugins are loaded when help or an unknown name asks for them."""

    def _plugin_commands(self) -> Mapping[str, click.Command]:
        from tokenspeed.config_sources import allowed_plugins
        from tokenspeed.plugins import load_plugins

        return {command.name or "": command for command in load_plugins(allowed_plugins()).commands()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the table, then of plugins."""
        return [*super().list_commands(ctx), *sorted(self._plugin_commands())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command of the table, or else one that a plugin brings."""
        return super().get_command(ctx, cmd_name) or self._plugin_commands().get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands of the table, then those of plugins."""
        super().format_commands(ctx, formatter)
        rows = [(name, command.get_short_help_str(80)) for name, command in sorted(self._plugin_commands().items())]
        _write_section(formatter, "Commands from plugins", rows)
