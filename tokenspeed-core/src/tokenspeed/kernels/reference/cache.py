"""Reference of `cache.write`; its `kv_layout` is `nhd`, which is [page, slot, kv head, feature] as allocated."""

from __future__ import annotations

import torch

from tokenspeed.kernels.operators import PAGE_SIZE


def write(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store k and v ([T,Hkv,D]) in their slots (int64[T]) of the caches; negative slots are skipped."""
    wanted = slots >= 0
    page, offset = slots[wanted] // PAGE_SIZE, slots[wanted] % PAGE_SIZE
    k_cache[page, offset] = k[wanted].to(k_cache.dtype)
    v_cache[page, offset] = v[wanted].to(v_cache.dtype)
