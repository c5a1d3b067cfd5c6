"""`norm.rms` in NumPy.

Shapes: T tokens, H hidden size. x is [T,H] or [T,heads,D]; of its strides only the last one is known to be 1.
"""

from __future__ import annotations

import numpy as np
import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last axis, rounded to x's dtype, times weight: x's shape and dtype, contiguous.

    Raises TypeError for a dtype that is not declared, ValueError when the weight does not fit.
    """
    if x.dtype not in (torch.float32, torch.bfloat16) or weight.dtype != x.dtype:
        raise TypeError(f"x {x.dtype}, weight {weight.dtype}: expected both float32 or both bfloat16")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}")
    wide = x.to(torch.float32).numpy()
    # A row that holds NaN or infinities gives NaN, quietly: it is one request's trouble.
    with np.errstate(all="ignore"):
        mean_square = np.mean(wide * wide, axis=-1, keepdims=True, dtype=np.float32)
        normalised = wide / np.sqrt(mean_square + np.float32(eps))
    return (torch.from_numpy(normalised).to(x.dtype) * weight).contiguous()
