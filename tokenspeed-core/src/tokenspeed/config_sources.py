"""Where options come from: arguments, then a YAML file, then environment variables, then defaults.

The first source that sets an option wins, and the option counts as *given* by that source. Every fault of every source
is collected into one ConfigError; an unknown key or variable is a fault, never ignored.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokenspeed.config import OPTIONS, SWITCH_OPTIONS, EngineConfig
from tokenspeed.errors import ConfigError
from tokenspeed.numerics.switches import SWITCHES

PREFIX = "TOKENSPEED_"

CONFIG_VARIABLE = PREFIX + "CONFIG"
"""Names the YAML file when `--config` does not."""

VARIABLES_FOR_TESTS = {
    PREFIX + "AOK_ISA": "for tests, the aok kernels use this instruction set and not the best one",
}
"""Variables with our prefix that are no options. They change no promise; the plan and the certificate show them."""

_ALL = {**OPTIONS, **SWITCH_OPTIONS}


@dataclass(frozen=True)
class _Setting:
    """A value as one source wrote it, and how to name that place in a message."""

    value: object
    source: str


def load_config(
    arguments: Mapping[str, object] | None = None,
    *,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    spell: Callable[[str, object], str] | None = None,
) -> EngineConfig:
    """Merge the sources into one configuration.

    `arguments` maps option names to values that were really given (on a command line or to `LLM`); `spell` says how a
    message names such an argument. `environ` is `os.environ` unless given. Raises ConfigError with every fault.
    """
    environ = os.environ if environ is None else environ
    spell = spell or _spell_flag
    faults: list[str] = []
    layers = [{name: _Setting(value, spell(name, value)) for name, value in (arguments or {}).items()}]
    path = config_file or environ.get(CONFIG_VARIABLE)
    if path is not None:
        layers.append(_from_yaml(Path(path), faults))
    layers.append(_from_environment(environ, faults))
    settings: dict[str, _Setting] = {}
    for layer in reversed(layers):
        settings |= layer
    values = {name: value for name, setting in settings.items() if (value := _read(name, setting, faults)) is not None}
    faults += _cross_faults(values, settings)
    if faults:
        raise ConfigError("\n".join(faults))
    switches = {name: values.pop(name) for name in SWITCHES if name in values}
    return EngineConfig(**values, switches=switches, given={name: settings[name].source for name in settings})


def config_from_arguments(**arguments: object) -> EngineConfig:
    """A configuration from Python arguments, as `LLM(...)` takes them; the environment fills what is not given."""
    return load_config(
        arguments, spell=lambda name, value: f"argument {name}={'…' if _is_secret(name) else repr(value)}"
    )


def _is_secret(name: str) -> bool:
    return name in _ALL and _ALL[name].secret


def _spell_flag(name: str, value: object) -> str:
    if name not in _ALL:
        return name
    option = _ALL[name]
    return f"--no-{option.flag[2:]}" if option.kind == "boolean" and value is False else option.flag


def variables_for_tests(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The testing variables that are set, with their values."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in VARIABLES_FOR_TESTS if environ.get(name)}


def allowed_plugins(text: str | None = None) -> tuple[str, ...] | None:
    """What `--plugins` allows, for commands that read no other option: `text`, or the environment, or None for all.

    Raises ConfigError when the text cannot be read.
    """
    option = OPTIONS["plugins"]
    value = os.environ.get(option.variable) if text is None else text
    if value is None:
        return None
    try:
        names: tuple[str, ...] = option.read(value)
    except ValueError as error:
        raise ConfigError(f"{option.flag}: {error}") from None
    return names


def _read(name: str, setting: _Setting, faults: list[str]) -> Any:
    """The typed value, or None after recording why there is none."""
    option = _ALL.get(name)
    if option is None:
        faults.append(f"{setting.source}: unknown option {name!r}{_near(name, _ALL)}")
        return None
    try:
        value = option.read(setting.value)
    except ValueError as error:
        faults.append(f"{setting.source}: {error}")
        return None
    if name in SWITCHES:
        value = {True: "on", False: "off"}.get(value, value)
        if fault := SWITCHES[name].fault(value):
            faults.append(f"{setting.source}: {fault.removeprefix(f'{SWITCHES[name].flag}: ')}")
            return None
    return value


def _cross_faults(values: Mapping[str, Any], settings: Mapping[str, _Setting]) -> Iterable[str]:
    if "kv_cache_memory" in values and "num_kv_pages" in values:
        both = f"{settings['kv_cache_memory'].source} and {settings['num_kv_pages'].source}"
        yield f"{both}: give the size of the KV cache once, as memory or as pages"


def _from_environment(environ: Mapping[str, str], faults: list[str]) -> dict[str, _Setting]:
    by_variable = {option.variable: option for option in _ALL.values()}
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or variable in VARIABLES_FOR_TESTS:
            continue
        option = by_variable.get(variable)
        if option is None:
            known = [*by_variable, CONFIG_VARIABLE]
            faults.append(f"environment variable {variable}: no such option{_near(variable, known)}")
        else:
            found[option.name] = _Setting(value, f"environment variable {variable}")
    return found


def _from_yaml(path: Path, faults: list[str]) -> dict[str, _Setting]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)  # a SafeLoader
    except OSError as error:
        faults.append(f"--config {path}: {error.strerror}")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        faults.append(f"--config {path}: {' '.join(str(error).split())}")
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict):
        faults.append(f"--config {path}: expected option names and values, got {type(content).__name__}")
        return {}
    found: dict[str, _Setting] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in found:
            faults.append(f"--config {path}: {key} is set twice")
        found[name] = _Setting(value, f"{key} in {path}")
    return found


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice, where PyYAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is set twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
