"""Reference of `rope.apply`."""

from __future__ import annotations

import torch


def apply(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T,Hq,D] and k [T,Hkv,D] rotated by the angles of `positions`, in fp32 with one rounding."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first R features of each head, cos and sin being [T,1,R/2]; the others pass through."""
    rotary_dim = 2 * cos.shape[-1]
    wide = x[..., :rotary_dim].to(torch.float32)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)
