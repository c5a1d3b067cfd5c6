"""A trainer's log-probabilities in a file, for an engine to be compared with. Knows the schema, and no trainer.

A dump is a safetensors file. Its metadata (strings):

    schema        tokenspeed/dump@1
    trainer       whose order of additions the log-probabilities have, as `--trainer` spells it
    layout        how the trainer batched the sequences, in words
    commit        what computed it: versions or a commit
    temperature   what logits were divided by; 1.0 if not given

and for each sequence i = 0, 1, … of T tokens:

    sequences.i.ids             int64[T]
    sequences.i.logprob         float32[T-1]: log p(ids[t+1] | ids[:t+1])
    sequences.i.logits          [n,V], optional: logits after the first n (at most 8) tokens, in the model's dtype
    sequences.i.prompt_length   int64[1], with `reported`
    sequences.i.reported        float32[T-prompt_length], optional: what the engine reported while generating the rest
    sequences.i.activations.NAME   [T,F], optional: outputs of a module by its name in the trainer's model;
                                NAME.input is what a module reads; of a router NAME.ids (int32) and NAME.weights
                                (float32), [T,k]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokenspeed.errors import ConfigError

SCHEMA = "tokenspeed/dump@1"
LOGITS_ROWS = 8
"""Rows of logits that a dump holds of each sequence, at most."""

_REQUIRED = ("trainer", "layout", "commit")
_OPTIONAL = ("temperature",)
_NAME = re.compile(r"sequences\.(\d+)\.(ids|logprob|logits|prompt_length|reported|activations\.[\w.]+)")


@dataclass(frozen=True)
class DumpedSequence:
    """One sequence of a dump; see the module's docstring. `prompt_length` is set when `reported` is."""

    ids: torch.Tensor
    logprob: torch.Tensor
    logits: torch.Tensor | None = None
    prompt_length: int | None = None
    reported: torch.Tensor | None = None
    activations: Mapping[str, torch.Tensor] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Dump:
    """Everything in one file."""

    trainer: str
    layout: str
    commit: str
    sequences: Sequence[DumpedSequence]
    temperature: float = 1.0


def write_dump(dump: Dump, path: Path) -> None:
    """Write a dump; the file is complete or not there."""
    metadata = {
        "schema": SCHEMA,
        "trainer": dump.trainer,
        "layout": dump.layout,
        "commit": dump.commit,
        "temperature": repr(dump.temperature),
    }
    tensors: dict[str, torch.Tensor] = {}
    for index, sequence in enumerate(dump.sequences):
        found: dict[str, torch.Tensor | None] = {
            "ids": sequence.ids,
            "logprob": sequence.logprob,
            "logits": sequence.logits,
            "reported": sequence.reported,
            "prompt_length": None if sequence.prompt_length is None else torch.tensor([sequence.prompt_length]),
            **{f"activations.{name}": tensor for name, tensor in sequence.activations.items()},
        }
        tensors |= {
            f"sequences.{index}.{name}": tensor.detach().cpu().contiguous()
            for name, tensor in found.items()
            if tensor is not None
        }
    partial = path.with_name(f"{path.name}.partial")
    save_file(tensors, partial, metadata)
    partial.replace(path)


def read_dump(path: Path, *, vocab_size: int | None = None) -> Dump:
    """Read and check a dump. Raises ConfigError that names the field where something is not as the schema says."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is no readable safetensors file: {error}") from error
    reader = _Reader(path, vocab_size)
    reader.check_metadata(metadata)
    sequences = reader.sequences(tensors)
    return Dump(
        metadata["trainer"], metadata["layout"], metadata["commit"], sequences, float(metadata.get("temperature", "1"))
    )


class _Reader:
    """Checks the parts of one file."""

    def __init__(self, path: Path, vocab_size: int | None) -> None:
        self._path = path
        self._vocab_size = vocab_size

    def _fail(self, what: str) -> ConfigError:
        return ConfigError(f"dump {self._path}: {what}")

    def check_metadata(self, metadata: Mapping[str, str]) -> None:
        if metadata.get("schema") != SCHEMA:
            raise self._fail(f"metadata schema is {metadata.get('schema')!r}, expected {SCHEMA!r}")
        for name in _REQUIRED:
            if not metadata.get(name):
                raise self._fail(f"metadata {name} is missing")
        if unknown := sorted(metadata.keys() - {"schema", "format", *_REQUIRED, *_OPTIONAL}):
            raise self._fail(f"metadata {unknown[0]} is unknown")
        try:
            temperature = float(metadata.get("temperature", "1"))
        except ValueError:
            temperature = -1.0
        if not 0 <= temperature < float("inf"):
            raise self._fail(f"metadata temperature is {metadata['temperature']!r}, expected a number from 0 on")

    def sequences(self, tensors: Mapping[str, torch.Tensor]) -> list[DumpedSequence]:
        by_index: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise self._fail(f"tensor {name} is unknown; names are sequences.N.FIELD")
            by_index.setdefault(int(match[1]), {})[match[2]] = tensor
        if sorted(by_index) != list(range(len(by_index))) or not by_index:
            raise self._fail(f"sequences are numbered {sorted(by_index)[:5]}…, expected 0, 1, 2, …")
        return [self._sequence(index, by_index[index]) for index in range(len(by_index))]

    def _sequence(self, index: int, fields: Mapping[str, torch.Tensor]) -> DumpedSequence:
        ids = self._need(index, fields, "ids", torch.int64, None)
        length = len(ids)
        if length < 2:
            raise self._fail(f"sequences.{index}.ids has {length} tokens, expected at least 2")
        if (ids < 0).any() or (self._vocab_size is not None and (ids >= self._vocab_size).any()):
            raise self._fail(
                f"sequences.{index}.ids holds {int(ids.max())} or a negative id; the model has "
                f"{self._vocab_size or 'no such'} entries in its vocabulary"
            )
        logprob = self._need(index, fields, "logprob", torch.float32, length - 1)
        prompt_length, reported = self._reported(index, fields, length)
        logits = fields.get("logits")
        if logits is not None and (logits.dim() != 2 or not 0 < len(logits) <= min(LOGITS_ROWS, length)):
            raise self._fail(
                f"sequences.{index}.logits is {list(logits.shape)}, expected [n,V] with n at most "
                f"{min(LOGITS_ROWS, length)}"
            )
        prefix = "activations."
        activations = {name.removeprefix(prefix): tensor for name, tensor in fields.items() if name.startswith(prefix)}
        for name, tensor in activations.items():
            if tensor.dim() != 2 or len(tensor) != length:
                raise self._fail(f"sequences.{index}.{prefix}{name} is {list(tensor.shape)}, expected [{length},F]")
        return DumpedSequence(ids, logprob, logits, prompt_length, reported, MappingProxyType(activations))

    def _reported(
        self, index: int, fields: Mapping[str, torch.Tensor], length: int
    ) -> tuple[int | None, torch.Tensor | None]:
        if "reported" not in fields and "prompt_length" not in fields:
            return None, None
        prompt_length = int(self._need(index, fields, "prompt_length", torch.int64, 1))
        if not 0 < prompt_length < length:
            raise self._fail(f"sequences.{index}.prompt_length is {prompt_length}, expected 1 to {length - 1}")
        return prompt_length, self._need(index, fields, "reported", torch.float32, length - prompt_length)

    def _need(
        self, index: int, fields: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, size: int | None
    ) -> torch.Tensor:
        tensor = fields.get(name)
        wanted = f"{dtype}[{'T' if size is None else size}]".removeprefix("torch.")
        if tensor is None:
            raise self._fail(f"sequences.{index}.{name} is missing, expected {wanted}")
        if tensor.dtype != dtype or tensor.dim() != 1 or (size is not None and len(tensor) != size):
            found = f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")
            raise self._fail(f"sequences.{index}.{name} is {found}, expected {wanted}")
        return tensor
