"""What a request means that says nothing about sampling: `generation_config.json` of the checkpoint, as vLLM reads it.

Imports no torch. `do_sample` and `max_new_tokens` are not read; a request that gives a value always has that one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tokenspeed.errors import CheckpointError

FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for requests that give none; without a file, those of the OpenAI interface."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def changed(self) -> dict[str, float | int]:
        """The values that are not those of the OpenAI interface, by name."""
        return {name: value for name, value in asdict(self).items() if value != getattr(OPENAI_DEFAULTS, name)}


OPENAI_DEFAULTS = SamplingDefaults()


def sampling_defaults(folder: Path, generation_config: str) -> SamplingDefaults:
    """The defaults of a checkpoint under `--generation-config auto` or `none`. CheckpointError for a wrong value."""
    path = folder / FILE
    if generation_config == "none" or not path.is_file():
        return OPENAI_DEFAULTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    values: dict[str, float | int] = {}
    for field in fields(SamplingDefaults):
        value = found.get(field.name) if isinstance(found, dict) else None
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if field.name == "top_k" else int | float):
            raise CheckpointError(f"{path}: {field.name} is {value!r}; --generation-config none leaves the file alone")
        values[field.name] = max(value, 0) if field.name == "top_k" else float(value)
    return SamplingDefaults(**values)  # type: ignore[arg-type]
