"""Every exception that tokenspeed raises on purpose.

    TokenspeedError
    ├── StartRefused            a start cannot keep what was asked for; carries every `Problem`
    ├── ConfigError             an option, config key or environment variable is wrong
    ├── PluginError             a plugin is broken, or two plugins clash
    ├── CheckpointError         weights or config files are missing, extra or mis-shaped
    ├── RequestError            one request is wrong (HTTP 4xx); everybody else is unharmed
    │   └── ContextOverflow     the prompt does not fit the model's context
    └── EngineDead              the engine process or thread ended; every waiting caller gets this

A message names both sides (what was given, what was expected) and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class TokenspeedError(Exception):
    """Base of all deliberate errors."""


@dataclass(frozen=True)
class Problem:
    """One reason why a start is refused.

    `kind` is a stable identifier (`conflict`, `missing-kernel`, `broken-plugin`, `profile`, `checkpoint`, …),
    `summary` one line that names both sides, `details` further lines (a verdict for each candidate),
    `remedy` what to change or install.
    """

    kind: str
    summary: str
    details: tuple[str, ...] = ()
    remedy: str = ""

    def render(self) -> str:
        """The problem as the user reads it, indented by its parts."""
        lines = [f"[{self.kind}] {self.summary}"]
        lines += [f"    {line}" for line in self.details]
        if self.remedy:
            lines.append(f"    -> {self.remedy}")
        return "\n".join(lines)


def problem_dict(problem: Problem) -> dict[str, Any]:
    """A problem as plain data, for JSON."""
    return {
        "kind": problem.kind,
        "summary": problem.summary,
        "details": list(problem.details),
        "remedy": problem.remedy,
    }


class StartRefused(TokenspeedError):
    """A start cannot keep its promise. All problems are collected and reported together."""

    exit_status = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problem.render() for problem in self.problems))


class ConfigError(TokenspeedError):
    """An option, config key or environment variable is unknown or out of range."""


class PluginError(TokenspeedError):
    """A plugin is broken, or two distributions claim one name."""


class CheckpointError(TokenspeedError):
    """A checkpoint's files do not describe the model that they claim to hold."""


class RequestError(TokenspeedError):
    """One request is wrong. `param` names the offending field, `code` is a stable identifier."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextOverflow(RequestError):
    """The prompt has more tokens than the model's context holds."""


class EngineDead(TokenspeedError):
    """The engine ended; nothing will be generated any more."""
