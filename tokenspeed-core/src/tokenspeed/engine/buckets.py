"""Which decode steps are recorded: sizes as data, and whether the chosen kernels allow it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.kernels.spec import CUDA_GRAPH, KernelSpec

BUCKET_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Rows of the buckets; what is chosen between them is padding against the time and memory of recording. Not timed."""

BUCKET_PAGES = (64, 512)
"""Widths of page tables (contexts of 1,024 and 8,192 tokens) below that of the longest context."""


class Bucket(NamedTuple):
    """Rows of a recorded decode step, and pages that each of its contexts may have."""

    rows: int
    pages: int


def plan_buckets(max_num_seqs: int, max_pages: int) -> tuple[Bucket, ...]:
    """Buckets for every decode step of an engine of up to 512 seats, the largest first.

    A step of more rows than the largest bucket is not recorded. `max_pages` holds the longest context.
    """
    most = min(max_num_seqs, BUCKET_ROWS[-1])
    rows = sorted({*(size for size in BUCKET_ROWS if size < most), most}, reverse=True)
    pages = sorted({*(width for width in BUCKET_PAGES if width < max_pages), max_pages}, reverse=True)
    return tuple(Bucket(size, width) for width in pages for size in rows)


@dataclass(frozen=True)
class Recording:
    """What of decoding is recorded: the buckets, or none and `reason`."""

    buckets: tuple[Bucket, ...] = ()
    reason: str = ""

    def as_dict(self) -> dict[str, object]:
        """As plain data, for JSON."""
        return {"buckets": [bucket._asdict() for bucket in self.buckets], "reason": self.reason}

    def describe(self) -> str:
        """One line for a reader."""
        if not self.buckets:
            return f"decode steps are not recorded as CUDA graphs: {self.reason}"
        rows, contexts = zip(*((bucket.rows, bucket.pages * PAGE_SIZE) for bucket in self.buckets), strict=True)
        longest = ", ".join(f"{tokens:,}" for tokens in sorted(set(contexts)))
        return (
            f"decode steps of up to {max(rows)} requests are recorded as {len(self.buckets)} CUDA graphs, "
            f"for contexts of up to {longest} tokens"
        )


def plan_recording(
    device: str, kernels: Iterable[KernelSpec], *, wanted: bool, max_num_seqs: int, max_model_len: int
) -> Recording:
    """Buckets for an engine of these sizes on `device`, if every one of its kernels can be recorded."""
    if device != "cuda":
        return Recording(reason=f"the device is {device}")
    if not wanted:
        return Recording(reason="--no-decode-graphs was given")
    # Scores are computed behind the recorded part of a step.
    unfit = sorted({k.name for k in kernels if CUDA_GRAPH not in k.features and k.operator not in _NOT_RECORDED})
    if unfit:
        return Recording(reason=f"{', '.join(unfit)} {'do' if len(unfit) > 1 else 'does'} not declare {CUDA_GRAPH}")
    return Recording(plan_buckets(max_num_seqs, -(-max_model_len // PAGE_SIZE)))


_NOT_RECORDED = ("sampling.logprobs", "sampling.block_sumexp")
