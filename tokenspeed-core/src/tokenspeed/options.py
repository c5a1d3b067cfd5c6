"""What an option is: its name, kind, help and how a value is read, whichever source it comes from. Knows no option."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["text", "path", "integer", "number", "size", "boolean", "choice", "names", "pairs"]

_WORDS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_EXPONENT = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Option:
    """One option of the engine: `--max-model-len`, the YAML key `max_model_len`, `TOKENSPEED_MAX_MODEL_LEN`.

    `kind` says how a value is read: `size` is bytes (`4GiB`), `names` a list separated by commas, `pairs` a list of
    `KEY=VALUE`. `minimum` bounds numbers. `pattern` is what each of `names` must look like. A `nullable` option may be
    `none`. A `secret` is never printed.
    """

    name: str
    kind: Kind
    group: str
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()
    minimum: float = -math.inf
    maximum: float = math.inf
    metavar: str = ""
    pattern: str = ""
    secret: bool = False

    @property
    def flag(self) -> str:
        """`--max-model-len`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`TOKENSPEED_MAX_MODEL_LEN`."""
        return "TOKENSPEED_" + self.name.upper()

    def read(self, value: object) -> Any:
        """The value as the configuration holds it, from text or from YAML. Raises ValueError: `expected …, got …`."""
        try:
            result = _READERS[self.kind](value)
        except (ValueError, TypeError):
            raise ValueError(f"expected {_EXPECTED[self.kind]}, got {self._shown(value)}") from None
        if self.kind == "choice" and result not in self.choices:
            raise ValueError(f"{self._shown(value)} is not one of {', '.join(self.choices)}")
        if isinstance(result, int | float) and not self.minimum <= result <= self.maximum:
            raise ValueError(f"{value!r} is out of range; {self._range()}")
        if self.pattern and (wrong := [name for name in result if not re.fullmatch(self.pattern, name)]):
            raise ValueError(f"{wrong[0]!r} does not match {self.pattern}")
        return result

    def _shown(self, value: object) -> str:
        return "a value that is not shown" if self.secret else repr(value)

    def _range(self) -> str:
        bounds = []
        if self.minimum > -math.inf:
            bounds.append(f"the least is {self.minimum:g}")
        if self.maximum < math.inf:
            bounds.append(f"the most is {self.maximum:g}")
        return " and ".join(bounds)


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    return str(value)


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _size(value: object) -> int:
    """Bytes: `K`, `M`, `G` and `T` count in 1000, with an `i` in 1024."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _EXPONENT[unit.upper()])


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str | int):
        raise TypeError
    word = str(value).lower()
    if word not in _WORDS:
        raise ValueError
    return _WORDS[word]


def _names(value: object) -> tuple[str, ...]:
    """`a,b`, a list of names, or `none` for an empty list."""
    items = value if isinstance(value, list | tuple) else [value]
    names = tuple(part.strip() for item in items for part in _text(item).split(","))
    if names == ("none",):
        return ()
    if not all(names):
        raise ValueError
    return names


def _pairs(value: object) -> Mapping[str, str]:
    """`a=b,c=d`, a list of `a=b`, or a mapping."""
    if isinstance(value, Mapping):
        items = [(_text(key), _text(item)) for key, item in value.items()]
    else:
        items = [(key.strip(), item.strip()) for key, _, item in (part.partition("=") for part in _names(value))]
    pairs = dict(items)
    if len(pairs) != len(items) or not all(key and item for key, item in items):
        raise ValueError
    return MappingProxyType(pairs)


_READERS: dict[Kind, Any] = {
    "text": _text,
    "path": _text,
    "choice": _text,
    "integer": _integer,
    "number": _number,
    "size": _size,
    "boolean": _boolean,
    "names": _names,
    "pairs": _pairs,
}
_EXPECTED: dict[Kind, str] = {
    "text": "text",
    "path": "a path",
    "choice": "a name",
    "integer": "an integer",
    "number": "a number",
    "size": "a size in bytes such as 512MiB or 4GiB",
    "boolean": "on or off",
    "names": "names separated by commas, or none",
    "pairs": "KEY=VALUE, each key once",
}
