"""Decode steps that were recorded once and are replayed, each for a bucket of `buckets`.

A step of fewer rows runs in the smallest bucket that holds it. The rows that are left over belong to no sequence
(`kernels.operators`): they write no slot and read no page, and nobody reads what comes out of them. A row's bits do not
depend on the rows beside it, so a step gives the same bits in every bucket, and without one.

On a device that records nothing (a CPU) the same function runs again on the same memory, so the logic is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tokenspeed.engine.buckets import Bucket
from tokenspeed.engine.device import Device
from tokenspeed.engine.inputs import InputBuffers, Shape, StepInputs


@dataclass
class DecodeOutputs:
    """What recorded steps write: logits [rows, V] in the model's dtype, tokens int64[rows]. The next one overwrites."""

    logits: torch.Tensor
    tokens: torch.Tensor


Decode = Callable[[StepInputs], tuple[torch.Tensor, torch.Tensor]]
"""One decode step: logits [R, V] and sampled tokens int64[R] of all its rows."""


class DecodeGraphs:
    """The recordings of one engine. Whoever asks for one gives the function that computes a step.

    It is not kept: an engine that refers to itself would hold a GPU's memory until Python looks for cycles.
    """

    def __init__(self, device: Device, inputs: InputBuffers, buckets: tuple[Bucket, ...]) -> None:
        self.buckets = tuple(sorted(buckets))
        self.replays = 0
        self._device = device
        self._inputs = inputs
        self._recorded: dict[Bucket, Callable[[], None]] = {}
        self._outputs: DecodeOutputs | None = None

    def find(self, rows: int, pages: int) -> Bucket | None:
        """The smallest bucket that holds `rows` contexts of up to `pages` pages: fewest rows, then fewest pages."""
        return next((bucket for bucket in self.buckets if bucket.rows >= rows and bucket.pages >= pages), None)

    def inputs(self, bucket: Bucket) -> StepInputs:
        """The arrays that a recording reads; fill and upload them, then `replay`."""
        return self._inputs.take(Shape(bucket.rows, bucket.rows, bucket.pages, bucket.rows))

    def record_all(self, decode: Decode) -> Iterator[int]:
        """Record every bucket, the largest first, so that smaller ones find room in its memory; yields how many are."""
        for done, bucket in enumerate(reversed(self.buckets), 1):
            inputs = self.inputs(bucket)
            inputs.host.pad(0)
            inputs.upload()
            self._recorded[bucket] = self._record(bucket, inputs, decode)
            yield done

    def forget(self) -> None:
        """The model is another object: recordings are made anew when they are needed."""
        self._recorded.clear()

    def replay(
        self, bucket: Bucket, inputs: StepInputs, rows: int, decode: Decode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and tokens of the first `rows` rows of uploaded `inputs`; valid until the next replay.

        A bucket that has no recording gets one: computing a step twice changes nothing that it wrote.
        """
        replay = self._recorded.get(bucket)
        if replay is None:
            replay = self._recorded[bucket] = self._record(bucket, inputs, decode)
        replay()
        self.replays += 1
        assert self._outputs is not None
        return self._outputs.logits[:rows], self._outputs.tokens[:rows]

    @torch.inference_mode()
    def _record(self, bucket: Bucket, inputs: StepInputs, decode: Decode) -> Callable[[], None]:
        if self._outputs is None:
            # The first run of all, outside of a recording, tells the shape and dtype of the logits.
            logits, tokens = decode(inputs)
            most = self.buckets[-1].rows
            self._outputs = DecodeOutputs(logits.new_zeros(most, logits.shape[1]), tokens.new_zeros(most))
        outputs = self._outputs

        def run() -> None:
            logits, tokens = decode(inputs)
            outputs.logits[: bucket.rows].copy_(logits)
            outputs.tokens[: bucket.rows].copy_(tokens)

        return self._device.record(run)
