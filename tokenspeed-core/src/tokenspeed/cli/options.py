"""The engine's options on a command line, from the same table as YAML keys and environment variables."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from tokenspeed.config import GROUPS, OPTIONS, SWITCH_OPTIONS
from tokenspeed.config_sources import load_config
from tokenspeed.options import Option

Function = TypeVar("Function", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A number in a range; what is no number (nan) is in none, and infinity only where `infinite` says so."""

    def __init__(self, *args: Any, infinite: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._infinite = infinite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self._infinite):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class GroupedOption(click.Option):
    """An option that knows its section of the help."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class EngineCommand(click.Command):
    """A command whose help shows the engine's options in sections, after its own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Own options first, then one section for each group of the table."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def engine_options(*groups: str, numerics: str = "auto") -> Callable[[Function], Function]:
    """Give a command `[MODEL]`, the options of `groups` (all when none is named) and `--config`.

    The command receives one keyword argument, `config`, merged from all sources; options that are not in `groups` can
    still come from a file or the environment. `numerics` is the envelope where the user gives none. Use with
    `@click.command(cls=EngineCommand)`.
    """
    table = [replace(option, default=numerics) if option.name == "numerics" else option for option in _table()]
    chosen = [option for option in table if option.group in (groups or GROUPS)]

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, config_file: str | None, **values: Any) -> Any:
            context = click.get_current_context()
            given = {}
            for option in chosen:
                value = values.pop(option.name)
                if context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
                    given[option.name] = value
            config = load_config(given, config_file=config_file)
            if "numerics" not in config.given:
                config = replace(config, numerics=numerics)
            return function(*args, config=config, **values)

        decorated: Any = run
        for option in reversed(chosen):
            decorated = _parameter(option)(decorated)
        return _config_option()(decorated)  # type: ignore[no-any-return]

    return decorate


def _table() -> Iterator[Option]:
    yield from OPTIONS.values()
    yield from SWITCH_OPTIONS.values()


def _parameter(option: Option) -> Callable[[Function], Function]:
    if option.name == "model":
        return click.argument("model", required=False)
    help_ = option.help + _default(option)
    if option.kind == "boolean":
        flags = f"{option.flag}/--no-{option.flag[2:]}"
        return click.option(flags, option.name, cls=GroupedOption, group=option.group, default=None, help=help_)
    # Values stay text here: one reader serves the command line, files and the environment, and collects all faults.
    return click.option(
        option.flag,
        option.name,
        cls=GroupedOption,
        group=option.group,
        multiple=option.kind in ("names", "pairs"),
        metavar=_metavar(option),
        help=help_,
    )


def _config_option() -> Callable[[Function], Function]:
    return click.option(
        "--config",
        "config_file",
        metavar="FILE",
        help="YAML file of options, by their names. The command line outranks it, and it outranks TOKENSPEED_* "
        "variables of the environment.",
    )


def _metavar(option: Option) -> str:
    if option.metavar:
        return option.metavar
    return "|".join(option.choices) if option.choices else option.kind.upper()


def _default(option: Option) -> str:
    if option.default in (None, (), {}) or option.kind == "pairs":
        return ""
    shown = {True: "on", False: "off"}[option.default] if option.kind == "boolean" else option.default
    return f"  [default: {shown}]"
