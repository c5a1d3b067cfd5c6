"""The numbers of one step, for the model and for sampling: written by the host, read by the device, in one block.

Knows shapes, dtypes and places in the block; does not know what the numbers mean. Views of equal shapes are made once:
a decode step like the one before it creates no tensor at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tokenspeed.engine.batch import ForwardBatch
from tokenspeed.engine.device import Arena, Device

_ALIGNMENT = 64
"""Every array begins at a multiple, in bytes, so that kernels may load whole vectors whatever the shapes are."""

_KEPT = 256
"""Shapes whose views are kept; beyond it they are forgotten and made again."""


class Shape(NamedTuple):
    """Tokens, sequences, width of the page tables, and rows that get a token (as in `kernels.operators`)."""

    tokens: int
    sequences: int
    width: int
    rows: int


class SamplingColumns(NamedTuple):
    """Arguments of `sampling.sample` behind the logits, one entry for each row."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass
class HostArrays:
    """What the host writes; the fields of `ForwardBatch`, and the columns with `sampled_positions` for `positions`."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    page_tables: np.ndarray
    logits_rows: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    sampled_positions: np.ndarray

    def pad(self, sequences: int) -> None:
        """Let the rows behind the first `sequences`, one for each, belong to no sequence; they are sampled greedily."""
        self.token_ids[sequences:] = 0
        self.positions[sequences:] = 0
        self.slots[sequences:] = -1
        self.query_starts[sequences:] = sequences
        self.context_lens[sequences:] = 0
        self.page_tables[sequences:] = 0
        for column in (self.logits_rows, self.temperature, self.top_k, self.min_p, self.seeds, self.sampled_positions):
            column[sequences:] = 0
        self.top_p[sequences:] = 1


_BATCH = ("token_ids", "positions", "slots", "query_starts", "context_lens", "page_tables", "logits_rows")


def _arrays(shape: Shape) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
    tokens, sequences, width, rows = shape
    return {
        "token_ids": (np.int64, (tokens,)),
        "positions": (np.int64, (tokens,)),
        "slots": (np.int64, (tokens,)),
        "query_starts": (np.int32, (sequences + 1,)),
        "context_lens": (np.int32, (sequences,)),
        "page_tables": (np.int32, (sequences, width)),
        "logits_rows": (np.int64, (rows,)),
        "temperature": (np.float32, (rows,)),
        "top_k": (np.int32, (rows,)),
        "top_p": (np.float32, (rows,)),
        "min_p": (np.float32, (rows,)),
        "seeds": (np.int64, (rows,)),
        "sampled_positions": (np.int64, (rows,)),
    }


def _places(shape: Shape) -> tuple[dict[str, tuple[int, int]], int]:
    """First and last byte of each array, and the size of the block."""
    places, end = {}, 0
    for name, (dtype, extents) in _arrays(shape).items():
        size = int(np.prod(extents)) * np.dtype(dtype).itemsize
        places[name] = (end, end + size)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end


class StepInputs:
    """The arrays of one step: `host` to write, then `upload`, then `batch` and `columns` to read."""

    __slots__ = ("_arena", "_size", "batch", "columns", "host", "shape")

    def __init__(
        self, arena: Arena, kv_caches: list[tuple[torch.Tensor, torch.Tensor]], shape: Shape, host: np.ndarray
    ) -> None:
        places, self._size = _places(shape)
        arrays, tensors = {}, {}
        for name, (dtype, extents) in _arrays(shape).items():
            first, last = places[name]
            arrays[name] = host[first:last].view(dtype).reshape(extents)
            torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
            tensors[name] = arena.device[first:last].view(torch_dtype).view(extents)
        self._arena = arena
        self.shape = shape
        self.host = HostArrays(**arrays)
        self.batch = ForwardBatch(**{name: tensors[name] for name in _BATCH}, kv_caches=kv_caches)
        self.columns = SamplingColumns(*(tensors[name] for name in list(arrays)[len(_BATCH) :]))

    def upload(self) -> None:
        """Let the device have what the host wrote."""
        self._arena.upload(self._size)


class InputBuffers:
    """Room for steps of at most `largest`. What `take` returned is overwritten by the next `take`."""

    def __init__(self, device: Device, largest: Shape, kv_caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._arena = device.arena(_places(largest)[1])
        self._views: dict[tuple[int, Shape], StepInputs] = {}
        self._kv_caches = kv_caches

    def take(self, shape: Shape) -> StepInputs:
        """Arrays of these shapes, with anything in them; on the device always at the same place for the same shape."""
        side, host = self._arena.begin()
        inputs = self._views.get((side, shape))
        if inputs is None:
            if len(self._views) >= _KEPT:
                self._views.clear()
            inputs = self._views[side, shape] = StepInputs(self._arena, self._kv_caches, shape, host)
        return inputs
