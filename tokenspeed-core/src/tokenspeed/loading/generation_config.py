"""What a request means that says nothing about sampling: `generation_config.json` of the checkpoint, as vLLM reads it.

Imports no torch. `do_sample` and `max_new_tokens` are not read; a request that gives a value always has that one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tokenspeed.engine.request import SamplingParams
from tokenspeed.engine.validation import Limits, validate_params
from tokenspeed.errors import CheckpointError, RequestError
from tokenspeed.loading.json_file import is_listed, read_json

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
    if generation_config == "none" or not is_listed(path):
        return OPENAI_DEFAULTS
    found = read_json(path)
    values: dict[str, float | int] = {}
    for field in fields(SamplingDefaults):
        value = found.get(field.name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if field.name == "top_k" else int | float):
            raise CheckpointError(f"{path}: {field.name} is {value!r}; --generation-config none leaves the file alone")
        values[field.name] = max(value, 0) if field.name == "top_k" else float(value)
    defaults = SamplingDefaults(**values)  # type: ignore[arg-type]
    try:
        validate_params(SamplingParams(**asdict(defaults)), Limits(vocab_size=1, max_model_len=1))
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}; --generation-config none leaves the file alone") from None
    return defaults
