"""GPU kernels in Triton, one operator family a file; each promises `batch_invariant`.

What gives the promise, in every file:

- An output element's operations and their order are fixed by the model's shapes, never by T, B, padding or neighbours.
- Sums outside the matrix unit follow a fixed tree (`arith.tree_sum`) that does not depend on how a compiler spreads a
  tile over threads. Sums inside it follow one instruction shape and ascending K (`tiles`).
- FP fusion is off; a fused multiply-add is written as one. No atomics, no TF32, no autotuner, no dependent launch.
- exp, log and the noise of sampling are written out in `arith`, so their bits do not depend on the GPU.

`specs` describes the kernels and imports neither torch nor triton; everything else here imports both.
"""

from __future__ import annotations

import importlib
from types import ModuleType

FAMILIES = ("embedding", "gemm", "norm", "rope", "activation", "cache", "attention", "logprobs", "sample")


def families() -> tuple[ModuleType, ...]:
    """The modules of all kernels; each has `forms(target)`, the compiled forms that a launch may ask for."""
    return tuple(importlib.import_module(f"{__name__}.{name}") for name in FAMILIES)
