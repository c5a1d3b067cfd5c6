"""`gemm.linear` over weights of int8 with one fp32 scale for each row, in a fixed order of additions.

Shapes: T tokens, K inner size, N outputs, P the power of two that holds K.

For one row of x and one output: the K products x * q, in fp32, are padded with zeros to P; then the second half is
added to the first, again and again, until one sum is left; it is multiplied by the scale, the bias is added, and the
result is rounded once. Every step is elementwise, so no row, thread or address has a say in another row's bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

LARGEST = 127
ELEMENTS_AT_ONCE = 1 << 22
"""Products that are held at a time: 16 MiB."""


@dataclass(frozen=True)
class Weight:
    """q int8[N,K] and scale fp32[N]; the weight is q * scale."""

    q: torch.Tensor
    scale: torch.Tensor


def prepare(stored: Mapping[str, torch.Tensor]) -> Weight:
    """The tensors of a checkpoint (`weight`, `weight_scale`) as the kernel takes them."""
    return Weight(stored["weight"].clone(), stored["weight_scale"].clone())


def quantise(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A float weight [N,K] in the format, and the weight that is read back, fp32."""
    wide = weight.to(torch.float32)
    scale = wide.abs().amax(-1).clamp_min(1e-12) / LARGEST
    q = torch.round(wide / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.int8)
    return {"weight": q, "weight_scale": scale}, q.to(torch.float32) * scale.unsqueeze(-1)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T,K] times the transpose of the weight, plus bias [N]: [T,N] in x's dtype.

    Raises TypeError for a dtype that is not declared, ValueError for shapes that do not fit.
    """
    outputs, k = weight.q.shape
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"x is {x.dtype}: expected float32 or bfloat16")
    if x.shape[1] != k:
        raise ValueError(f"x has {x.shape[1]} columns, the weight takes {k}")
    wide = x.to(torch.float32)
    out = torch.empty(len(x), outputs, dtype=torch.float32)
    step = max(1, ELEMENTS_AT_ONCE // max(1, len(x) * k))
    for first in range(0, outputs, step):
        q = weight.q[first : first + step].to(torch.float32)
        out[:, first : first + step] = _tree_sum(wide.unsqueeze(1) * q)
    out = out * weight.scale
    return (out if bias is None else out + bias.to(torch.float32)).to(x.dtype)


def _tree_sum(products: torch.Tensor) -> torch.Tensor:
    """[T,N,K] -> [T,N]: halves are added until one entry is left."""
    width = 1 << max(0, products.shape[-1] - 1).bit_length()
    products = torch.nn.functional.pad(products, (0, width - products.shape[-1]))
    while width > 1:
        width //= 2
        products = products[..., :width] + products[..., width:]
    return products[..., 0]
