"""JSON files of a checkpoint: an object, or a CheckpointError that names the file. Imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenspeed.errors import CheckpointError


def is_listed(path: Path) -> bool:
    """Whether the folder has an entry of that name. One that leads nowhere, as into a cache that was cleaned, is there
    and cannot be read: a file that was left out by mistake must not pass for one that never was."""
    return os.path.lexists(path)


def read_text(path: Path) -> str:
    """The file's text. Raises CheckpointError when it cannot be read or is not UTF-8."""
    if path.exists() and not path.is_file() and not path.is_dir():
        # Whoever opens a pipe waits for its writer.
        raise CheckpointError(f"{path} cannot be read: no regular file")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        where = f" (it is a link to {os.readlink(path)})" if path.is_symlink() else ""
        raise CheckpointError(f"{path} cannot be read: {error.strerror}{where}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file holds. Raises CheckpointError when there is none."""
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value


def read_json_if_any(path: Path) -> dict[str, Any]:
    """`read_json`, or an empty object where there is no such file."""
    return read_json(path) if is_listed(path) else {}
