"""From the name that a user gives to the directory that holds the model. Nothing is downloaded.

A name is, in this order: a directory; a model that an installed distribution carries (`tiny`); the id of a model in the
local Hugging Face cache (`Qwen/Qwen3-0.6B`).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tokenspeed.errors import CheckpointError

_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")


def locate_model(name: str, embedded: Mapping[str, str], revision: str = "main") -> Path:
    """The model's directory. `embedded` maps short names to `"package:relative/path"`; `revision` is for cached ids.

    Raises CheckpointError, with everywhere that was looked, when there is none.
    """
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # a folder that may not be entered, a name too long, an unknown ~user
        raise CheckpointError(f"no model at {name[:200]}: {getattr(error, 'strerror', None) or error}") from error
    if is_folder:
        return path
    if is_file:
        raise CheckpointError(
            f"{name} is a file; give the directory that holds config.json, the tokenizer and *.safetensors"
        )
    if name in embedded:
        return _embedded(name, embedded[name])
    looked = [f"directory: {path.absolute()}", f"embedded models: {', '.join(sorted(embedded)) or 'none installed'}"]
    if _ID.fullmatch(name):
        if cached := _cached(name, revision):
            return cached
        looked.append(f"Hugging Face cache: {_cache_folder(name)} at {revision}")
    raise CheckpointError(
        "\n".join(
            [
                f"no model {name!r} is here; looked for",
                *(f"    {place}" for place in looked),
                "    -> give a directory, or fetch the model first (hf download ORG/NAME)",
            ]
        )
    )


def _embedded(name: str, target: str) -> Path:
    package, _, inside = target.partition(":")
    spec = importlib.util.find_spec(package)
    for root in spec.submodule_search_locations or () if spec else ():
        if (Path(root) / inside).is_dir():
            return Path(root) / inside
    raise CheckpointError(
        f"the embedded model {name!r} should be at {inside} inside {package}, and is not; reinstall it"
    )


def _cache_root() -> Path:
    """Where huggingface_hub keeps models, from the same environment variables."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{base}/huggingface")).expanduser() / "hub"


def _cache_folder(model_id: str) -> Path:
    return _cache_root() / f"models--{model_id.replace('/', '--')}"


def _cached(model_id: str, revision: str) -> Path | None:
    folder = _cache_folder(model_id)
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
