"""A Hugging Face checkpoint on disk: `config.json` and safetensors, one file or several with an index.

Weights are read tensor by tensor. A layer is allocated when its first tensor arrives and packed for its kernels as soon
as its last one has, so the peak is the packed model, one layer, and the largest tensor.
Pickled checkpoints are refused, and code in a checkpoint is never run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tokenspeed.errors import CheckpointError
from tokenspeed.loading.json_file import is_listed, read_json, read_json_if_any
from tokenspeed.loading.weight_file import STORED_DTYPES, WEIGHT_DTYPES, StoredTensor, WeightFile
from tokenspeed.models.base import CausalLM

Progress = Callable[[int, int], None]
"""Called while loading with (bytes read, bytes in all)."""

_NAMES_SHOWN = 20


class Filling:
    """A model while its tensors arrive, each once and in any order. `finish` when all have."""

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._targets = model.checkpoint_tensors()
        self._open = Counter(target.layer for target in self._targets.values())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor in, converting its dtype; a layer whose last one it is gets packed."""
        target = self._targets[name]
        target.layer.allocate(self._device)
        target.fill(tensor)
        self._open[target.layer] -= 1
        if not self._open[target.layer]:
            target.layer.prepare_weights()

    def finish(self) -> None:
        """Prepare the layers that read no tensor of their own."""
        for _, layer in self._model.weight_layers():
            if layer not in self._open:
                layer.allocate(self._device)
                layer.prepare_weights()


class Checkpoint:
    """A model's directory. Opening it reads `config.json` only (or nothing, when `config` is given); everything else is
    read when asked for.

    Every method raises CheckpointError, naming the file, when something is missing or malformed.
    """

    def __init__(self, folder: Path, config: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.config: dict[str, Any] = read_json(folder / "config.json") if config is None else config

    @property
    def architecture(self) -> str:
        """The one entry of `architectures`."""
        names = self.config.get("architectures")
        if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
            return names[0]
        raise CheckpointError(f"{self.folder / 'config.json'}: architectures={names!r} should name one architecture")

    @property
    def dtype(self) -> torch.dtype:
        """What `config.json` states as `dtype` (older files: `torch_dtype`); float32 when it states none."""
        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        for dtype in WEIGHT_DTYPES.values():
            if str(name).removeprefix("torch.") == str(dtype).removeprefix("torch."):
                return dtype
        raise CheckpointError(f"{self.folder / 'config.json'}: dtype={name!r} is not one of float32, bfloat16, float16")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, or nothing when there is none."""
        return read_json_if_any(self.folder / "generation_config.json")

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a sequence, from `generation_config.json` or else `config.json`."""
        value = self.generation_config.get("eos_token_id")
        if value is None:
            value = self.config.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise CheckpointError(f"{self.folder}: eos_token_id={value!r} is neither a token id nor a list of them")
        return frozenset(values)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of the checkpoint, by name, from the headers of its files."""
        found: dict[str, StoredTensor] = {}
        for file in self._files.values():
            for name, stored in file.tensors.items():
                if name in found:
                    raise CheckpointError(f"tensor {name} is in both {found[name].file} and {file.path}")
                found[name] = stored
        return found

    def check(self, model: CausalLM) -> None:
        """Raise CheckpointError with every tensor that is missing, unexpected, mis-shaped or of an unreadable dtype."""
        model.choose_forms(self.tensors)
        wanted = model.checkpoint_tensors()
        faults = listed("missing", [name for name in wanted if name not in self.tensors])
        faults += listed(
            "unexpected", [name for name in self.tensors if name not in wanted and not model.ignores(name)]
        )
        both = [(name, self.tensors[name], target) for name, target in wanted.items() if name in self.tensors]
        faults += listed(
            "mis-shaped",
            [
                f"{name} is {list(stored.shape)}, the model wants {list(target.shape)}"
                for name, stored, target in both
                if stored.shape != target.shape
            ],
        )
        faults += listed(
            "unreadable",
            [
                f"{name} is {stored.dtype}"
                for name, stored, target in both
                if not target.takes(STORED_DTYPES.get(stored.dtype))
            ],
        )
        if faults:
            heading = f"{self.folder} does not fit {self.architecture} as its config.json describes it"
            raise CheckpointError("\n".join([heading, *faults]))

    def load(self, model: CausalLM, *, device: torch.device | str = "cpu", progress: Progress | None = None) -> None:
        """Fill `model`, whose operations are bound, and pack its weights; values are converted to its dtype.

        Calls `check` first. A model that was filled once cannot be filled again.
        """
        self.check(model)
        targets = model.checkpoint_tensors()
        filling = Filling(model, torch.device(device))
        total = sum(self.tensors[name].num_bytes for name in targets)
        done = 0
        for name, tensor in self.read(targets):
            filling.add(name, tensor)
            done += self.tensors[name].num_bytes
            if progress:
                progress(done, total)
        filling.finish()

    def read(self, wanted: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The wanted tensors, file by file; each is valid until the next one is asked for.

        Raises CheckpointError when a file changed since its header was read.
        """
        by_file: dict[Path, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for path, names in by_file.items():
            yield from self._files[path].read(names)

    def check_unchanged(self) -> None:
        """Raise CheckpointError when a file of weights is not the one whose header was read."""
        for file in self._files.values():
            file.check_unchanged()

    @cached_property
    def _files(self) -> dict[Path, WeightFile]:
        return {path: WeightFile.examine(path) for path in self._weight_files()}

    def _weight_files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if is_listed(index):
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise CheckpointError(f"{index}: weight_map should map each tensor to a file")
            files = [self.folder / name for name in sorted(set(weight_map.values()))]
            if absent := [path.name for path in files if not path.is_file() or path.parent != self.folder]:
                raise CheckpointError(f"{index} names files that are not here: {', '.join(absent)}")
            return files
        if is_listed(single):
            return [single]
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern))
        if pickled:
            raise CheckpointError(
                f"{self.folder} holds its weights as pickle only ({', '.join(pickled[:_NAMES_SHOWN])}), which can run "
                "code when it is read; convert them to safetensors (transformers: save_pretrained)"
            )
        raise CheckpointError(f"{self.folder} holds neither model.safetensors nor model.safetensors.index.json")


def listed(what: str, names: list[str]) -> list[str]:
    """`names` under a heading, the first few in full and the others counted."""
    if not names:
        return []
    lines = [f"    {what} ({len(names)}):", *(f"        {name}" for name in names[:_NAMES_SHOWN])]
    if len(names) > _NAMES_SHOWN:
        lines.append(f"        and {len(names) - _NAMES_SHOWN} more")
    return lines
