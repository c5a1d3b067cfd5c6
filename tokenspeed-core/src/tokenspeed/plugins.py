"""Loads plugins, guards them, and reports on them; decides nothing about kernels, models or numerics.

A plugin is an entry point in the group `tokenspeed`. Every plugin is loaded and asked under guard: one that raises, was
written for another version of the hooks, misspells a hook or returns something unusable is recorded with its error and
is used for nothing. When two distributions claim one name neither of them gets it, and a start is refused.
This module imports no torch.
"""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pluggy
from importlib_metadata import EntryPoint, entry_points

from tokenspeed import hookspecs
from tokenspeed.cli.commands import COMMANDS
from tokenspeed.errors import ConfigError, PluginError, Problem
from tokenspeed.kernels.registry import spec_faults
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.models.profile import ModelProfile
from tokenspeed.numerics.envelopes import BUILTIN_TRAINERS, TrainerProfile, trainer_faults

if TYPE_CHECKING:
    import click

GROUP = "tokenspeed"

SLOW_SECONDS = 1.0
"""A plugin that takes longer to load is pointed out: stating facts takes milliseconds."""

Status = Literal["ok", "broken", "clash", "disabled"]


@dataclass(frozen=True)
class PluginReport:
    """What became of one plugin.

    `name` is the entry point's name and `target` its value. `kernels`, `models`, `trainer_profiles` and `commands` are
    the names that it registered, sorted. `waivers` are the checks of the conformance kit that its author waives for a
    kernel, each with the reason that he gives, and `seconds` is what importing and asking it took. `error` is one line,
    set when `status` is not `ok`: `broken` (nothing of the plugin is used), `clash` (it claims a name that another
    distribution claims too) or `disabled` (`--plugins`).
    """

    name: str
    target: str
    distribution: str
    version: str
    status: Status = "ok"
    error: str = ""
    kernels: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    trainer_profiles: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    waivers: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def slowness(self) -> str | None:
        """A sentence about a plugin that takes long to load, since every command waits for it; None as a rule."""
        if self.seconds < SLOW_SECONDS:
            return None
        return f"plugin {self.name} ({self.distribution} {self.version}) takes {self.seconds:.1f} s to load"

    def describe(self) -> str:
        """One line for a refusal: `plugin NAME (DISTRIBUTION VERSION) is broken: ImportError: …`."""
        return f"plugin {self.name} ({self.distribution} {self.version}) is {self.status}: {self.error}"


@dataclass
class _Contribution:
    """What one plugin's hooks returned, checked and stamped with its distribution."""

    report: PluginReport
    kernels: Sequence[KernelSpec] = ()
    models: Sequence[ModelProfile] = ()
    trainer_profiles: Sequence[TrainerProfile] = ()
    commands: Sequence[click.Command] = ()


class PluginHost:
    """The plugins of this process: what they contribute and how each of them fared. Made by `load_plugins`."""

    def __init__(self, contributions: Iterable[_Contribution]) -> None:
        self._contributions = list(contributions)
        self.problems = self._settle_clashes()
        """Names claimed twice, one Problem each; a start must refuse them."""

    def notes(self) -> Iterator[str]:
        """What is wrong with plugins although it is no reason to refuse a start: broken ones, and slow ones."""
        yield from (report.describe() for report in self.reports if report.status == "broken")
        yield from (slow for report in self.reports if (slow := report.slowness()))

    @property
    def reports(self) -> tuple[PluginReport, ...]:
        """One report for each installed plugin, by name."""
        return tuple(sorted((c.report for c in self._contributions), key=lambda report: report.name))

    def kernels(self) -> tuple[KernelSpec, ...]:
        """Every kernel that exactly one distribution claims, with `distribution` and `version` filled."""
        return tuple(self._unclaimed_twice("kernels"))

    def models(self) -> tuple[ModelProfile, ...]:
        """Every architecture that exactly one distribution claims, with `distribution` and `version` filled."""
        return tuple(self._unclaimed_twice("models"))

    def trainer_profiles(self) -> tuple[TrainerProfile, ...]:
        """The built-in trainer profiles and those of plugins."""
        return (*BUILTIN_TRAINERS, *self._unclaimed_twice("trainer_profiles"))

    def commands(self) -> tuple[click.Command, ...]:
        """Subcommands for the command line."""
        return tuple(self._unclaimed_twice("commands"))

    def broken(self) -> tuple[PluginReport, ...]:
        """Reports of plugins that are installed but unusable, or switched off."""
        return tuple(report for report in self.reports if report.status != "ok")

    def _claims(self, kind: str) -> dict[str, list[_Contribution]]:
        claims: dict[str, list[_Contribution]] = {}
        for contribution in self._contributions:
            for item in getattr(contribution, kind):
                claims.setdefault(_NAME_OF[kind](item), []).append(contribution)
        return claims

    def _unclaimed_twice(self, kind: str) -> Iterator[Any]:
        claims = self._claims(kind)
        for contribution in self._contributions:
            yield from (item for item in getattr(contribution, kind) if len(claims[_NAME_OF[kind](item)]) == 1)

    def _settle_clashes(self) -> tuple[Problem, ...]:
        problems = []
        for kind, noun in _NOUN.items():
            for name, claimants in self._claims(kind).items():
                if len(claimants) > 1:
                    problems.append(_clash(noun, name, claimants))
        return tuple(problems)


def load_plugins(allow: Sequence[str] | None = None) -> PluginHost:
    """Load every installed plugin under guard, or only those in `allow` (an empty list loads none).

    `allow` holds names of entry points or of distributions. Raises ConfigError when a name in it is not installed.
    Never raises because of a plugin: look at `reports` and `problems`.
    """
    found = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    _check_allowed(allow, found)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return PluginHost(_contribution(manager, entry, allow) for entry in found)


def _contribution(manager: pluggy.PluginManager, entry: EntryPoint, allow: Sequence[str] | None) -> _Contribution:
    distribution = entry.dist.name if entry.dist else "?"
    version = entry.dist.version if entry.dist else "?"
    report = PluginReport(entry.name, entry.value, distribution, version)
    if allow is not None and entry.name not in allow and distribution not in allow:
        return _Contribution(replace(report, status="disabled", error="not named by --plugins"))
    started = time.perf_counter()
    try:
        plugin = entry.load()
        _check_api_version(plugin)
        _check_hook_names(plugin)
        _register(manager, plugin, entry.name)
        contribution = _Contribution(report, **_ask(manager, plugin, distribution, version))
    except (Exception, SystemExit) as error:  # a plugin may raise anything, and must not take the host down
        return _Contribution(replace(report, status="broken", error=_one_line(error)))
    names: dict[str, Any] = {kind: tuple(sorted(map(_NAME_OF[kind], getattr(contribution, kind)))) for kind in _NOUN}
    waivers = (f"{k.name} waives {check}: {why}" for k in contribution.kernels for check, why in k.waivers.items())
    seconds = time.perf_counter() - started
    contribution.report = replace(report, **names, waivers=tuple(sorted(waivers)), seconds=seconds)
    return contribution


def _check_allowed(allow: Sequence[str] | None, found: Sequence[EntryPoint]) -> None:
    installed = {name for entry in found for name in (entry.name, entry.dist.name if entry.dist else entry.name)}
    if unknown := [name for name in allow or () if name not in installed]:
        raise ConfigError(
            f"--plugins: {', '.join(unknown)} is not installed; installed: {', '.join(sorted(installed)) or 'none'}"
        )


def _check_api_version(plugin: object) -> None:
    version = getattr(plugin, "TOKENSPEED_API", hookspecs.API_VERSION)
    if isinstance(version, bool) or not isinstance(version, int):
        raise PluginError(f"TOKENSPEED_API is {version!r}; it must be an integer")
    if version != hookspecs.API_VERSION:
        raise PluginError(
            f"written for version {version} of the plugin hooks, and this tokenspeed has version "
            f"{hookspecs.API_VERSION}; install a release of the plugin that supports it"
        )


def _hook_names() -> list[str]:
    return [name for name in vars(hookspecs) if name.startswith("tokenspeed_")]


def _check_hook_names(plugin: object) -> None:
    """Catch functions called `tokenspeed_…` that pluggy would pass over in silence."""
    known = _hook_names()
    for name, value in inspect.getmembers(plugin, inspect.isroutine):
        if not name.startswith("tokenspeed_"):
            continue
        marks = getattr(value, f"{hookspecs.PROJECT}_impl", None)
        if name not in known and not (marks and marks["optionalhook"]):
            near = difflib.get_close_matches(name, known, n=1)
            raise PluginError(f"unknown hook {name}" + (f"; did you mean {near[0]}?" if near else ""))
        if marks is None:
            raise PluginError(f"{name} is not marked with @hookimpl, so it would never be called")


def _register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    manager.register(plugin, name)
    try:
        # Every plugin before this one passed, so a pending hook is this one's.
        manager.check_pending()
    except pluggy.PluginValidationError:
        manager.unregister(plugin)
        raise


def _ask(manager: pluggy.PluginManager, plugin: object, distribution: str, version: str) -> dict[str, Any]:
    """Call the plugin's hooks one by one and return its checked, stamped contributions by kind."""
    answers: dict[str, list[Any]] = {kind: [] for kind in _NOUN}
    for caller in manager.get_hookcallers(plugin) or ():
        if not caller.has_spec():
            continue  # an optional hook of a newer host
        kind = caller.name.removeprefix("tokenspeed_")
        for implementation in caller.get_hookimpls():
            if implementation.plugin is not plugin:
                continue
            if implementation.wrapper or implementation.hookwrapper:
                raise PluginError(f"{caller.name} is a hook wrapper; a plugin states facts and wraps nobody else's")
            answers[kind] += _checked(caller.name, kind, implementation.function())
    stamp = partial(replace, distribution=distribution, version=version)
    return {kind: items if kind == "commands" else [stamp(item) for item in items] for kind, items in answers.items()}


def _checked(hook: str, kind: str, answer: object) -> list[Any]:
    if isinstance(answer, str | bytes) or not isinstance(answer, Iterable):
        raise PluginError(f"{hook} returned {answer!r}, not a list")
    items = list(answer)
    if faults := [fault for item in items for fault in _FAULTS[kind](item)]:
        raise PluginError(f"{hook}: {'; '.join(faults)}")
    names = [_NAME_OF[kind](item) for item in items]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PluginError(f"{hook} returned {', '.join(twice)} more than once")
    return items


def _model_faults(profile: object) -> list[str]:
    if not isinstance(profile, ModelProfile):
        return [f"{profile!r} is not a ModelProfile"]
    faults = []
    if ":" not in profile.model:
        faults.append(f"model {profile.architecture}: {profile.model!r} is not 'module:Class'")
    if not isinstance(profile.numerics_envelopes, frozenset):
        faults.append(f"model {profile.architecture}: numerics_envelopes must be a frozenset of names")
    return faults


def _command_faults(command: object) -> list[str]:
    import click

    if not isinstance(command, click.Command):
        return [f"{command!r} is not a click command"]
    if not command.name:
        return ["a command has no name"]
    return [f"command {command.name} is built in"] if command.name in COMMANDS else []


def _clash(noun: str, name: str, claimants: Sequence[_Contribution]) -> Problem:
    sides = [f"{c.report.distribution} {c.report.version}" for c in claimants]
    for contribution in claimants:
        others = ", ".join(side for c, side in zip(claimants, sides, strict=True) if c is not contribution)
        contribution.report = replace(
            contribution.report, status="clash", error=f"{noun} {name} is also claimed by {others}"
        )
    return Problem(
        "plugin-clash",
        f"{noun} {name} is claimed by {' and by '.join(sides)}",
        remedy="uninstall one of them, or name the plugins to load with --plugins",
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}"


_NOUN = {
    "kernels": "kernel",
    "models": "architecture",
    "trainer_profiles": "trainer profile",
    "commands": "command",
}
_NAME_OF: dict[str, Callable[[Any], str]] = {
    "kernels": lambda spec: spec.name,
    "models": lambda profile: profile.architecture,
    "trainer_profiles": lambda profile: profile.name,
    "commands": lambda command: command.name,
}
_FAULTS: dict[str, Callable[[object], list[str]]] = {
    "kernels": spec_faults,
    "models": _model_faults,
    "trainer_profiles": trainer_faults,
    "commands": _command_faults,
}
