"""New weights for a model that computes: everything is read, checked, hashed and packed before anything is exchanged.

A second model of the same kind is filled beside the first one, under the same plan. Whatever is wrong with the new
weights shows while the old ones still serve; exchanging the two is then one assignment. For that moment there is memory
for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from tokenspeed.errors import CheckpointError
from tokenspeed.loading.checkpoint import Checkpoint, Filling, listed
from tokenspeed.loading.json_file import is_listed
from tokenspeed.loading.weight_file import STORED_DTYPES
from tokenspeed.models.base import CausalLM
from tokenspeed.numerics.weights import TensorDigest, WeightsDigest, tensor_digest, version_of

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""A checkpoint's tensors with their names there, in any order."""

_STORED_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True)
class StagedWeights:
    """New weights, packed and ready; `digest` covers the tensors as they were given."""

    model: CausalLM
    digest: WeightsDigest

    @property
    def default_version(self) -> str:
        """A version for whoever gives none."""
        return version_of(self.digest.hex)


class WeightStaging:
    """Makes `StagedWeights` for one engine.

    `checkpoint` is what the engine was started from; `rebuild` returns its model once more, without memory and bound to
    the same kernels.
    """

    def __init__(self, checkpoint: Checkpoint, rebuild: Callable[[], CausalLM], device: str = "cpu") -> None:
        self._checkpoint = checkpoint
        self._rebuild = rebuild
        self._device = torch.device(device)

    def from_source(self, source: str | Path | NamedTensors) -> StagedWeights:
        """A folder's weights, or those that an iterable of (name, tensor) gives. Raises CheckpointError."""
        return self.from_folder(Path(source)) if isinstance(source, str | Path) else self.from_tensors(source)

    def from_folder(self, folder: Path) -> StagedWeights:
        """Read `model.safetensors`, or several files with their index.

        Of a `config.json` beside them only the architecture is looked at: the configuration stays that of the start.
        Raises CheckpointError, with every tensor that is wrong.
        """
        try:
            return self._from_folder(folder)
        except OSError as error:  # a name that is too long, a folder that may not be entered
            raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error

    def _from_folder(self, folder: Path) -> StagedWeights:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder on the machine of the engine")
        if is_listed(folder / "config.json"):
            architecture = Checkpoint(folder).architecture
            if architecture != self._checkpoint.architecture:
                raise CheckpointError(
                    f"{folder} holds a {architecture}, the engine runs a {self._checkpoint.architecture}; another "
                    "model needs another engine"
                )
        checkpoint = Checkpoint(folder, self._checkpoint.config)
        model = self._rebuild()
        checkpoint.check(model)
        return self._fill(model, checkpoint.read(model.checkpoint_tensors()))

    def from_tensors(self, tensors: NamedTensors) -> StagedWeights:
        """Take tensors by their names in a checkpoint, or in a trainer's model where those differ (stacked experts).

        Each is copied before the next one is asked for.

        All tensors of the model must come, each once; their dtype is converted to the model's. Raises CheckpointError,
        with every tensor that is wrong or missing.
        """
        if not isinstance(tensors, Iterable):
            raise CheckpointError(f"new weights are a folder, or (name, tensor) pairs, not {type(tensors).__name__}")
        model = self._rebuild()
        return self._fill(model, fitting(model, _readable(tensors)))

    def _fill(self, model: CausalLM, tensors: NamedTensors) -> StagedWeights:
        digests: dict[str, TensorDigest] = {}
        filling = Filling(model, self._device)
        for name, tensor in tensors:
            digests[name] = TensorDigest(_STORED_NAMES[tensor.dtype], tuple(tensor.shape), tensor_digest(tensor))
            filling.add(name, tensor)
        filling.finish()
        return StagedWeights(model, WeightsDigest(MappingProxyType(digests)))


def _readable(tensors: NamedTensors) -> NamedTensors:
    """Pass on pairs of a name and a tensor whose values are here. Raises CheckpointError at the first other thing."""
    for pair in tensors:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise CheckpointError(f"new weights are (name, tensor) pairs, and one is {str(pair)[:100]}")
        name, tensor = pair
        if hasattr(tensor, "full_tensor"):
            raise CheckpointError(f"{name} is a distributed tensor; gather it first, with its full_tensor()")
        if tensor.is_meta or tensor.layout != torch.strided:
            where = "on the meta device, without values" if tensor.is_meta else f"a {tensor.layout} tensor, not strided"
            raise CheckpointError(f"{name} is {where}")
        yield name, tensor


def fitting(
    model: CausalLM,
    tensors: NamedTensors,
    summary: str = "the new weights do not fit the model that is running",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass on, piece by piece, what fits into `model`; raise when all have been seen and something was wrong.

    The CheckpointError begins with `summary`.
    """
    wanted = model.checkpoint_tensors()
    seen: Counter[str] = Counter()
    unexpected, misshaped, unreadable = [], [], []
    for name, tensor in _pieces(model, wanted, tensors, summary):
        target = wanted.get(name)
        if target is None:
            if not model.ignores(name):
                unexpected.append(name)
            continue
        seen[name] += 1
        if seen[name] > 1:  # its layer may be packed by now
            continue
        if tuple(tensor.shape) != target.shape:
            misshaped.append(f"{name} is {list(tensor.shape)}, the model wants {list(target.shape)}")
        elif not target.takes(tensor.dtype):
            unreadable.append(f"{name} is {tensor.dtype}")
        else:
            yield name, tensor.detach()
    faults = listed("missing", [name for name in wanted if name not in seen])
    faults += listed("unexpected", unexpected)
    faults += listed("mis-shaped", misshaped)
    faults += listed("unreadable", unreadable)
    faults += listed("given twice", [name for name, count in seen.items() if count > 1])
    if faults:
        raise CheckpointError("\n".join([summary, *faults]))


def _pieces(
    model: CausalLM, wanted: Collection[str], tensors: NamedTensors, summary: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint that these are. Raises CheckpointError for a bundle of another shape."""
    bundles = model.bundles()
    for name, tensor in tensors:
        bundle = None if name in wanted else bundles.get(name)
        if bundle is None:
            yield name, tensor
        elif tuple(tensor.shape) in bundle.shapes:
            yield from ((piece, tensor[index]) for piece, index in bundle.pieces.items())
        else:
            shapes = " or ".join(str(list(shape)) for shape in bundle.shapes)
            raise CheckpointError(
                f"{summary}\n    mis-shaped (1):\n        {name} is {list(tensor.shape)}, the model wants {shapes}"
            )
