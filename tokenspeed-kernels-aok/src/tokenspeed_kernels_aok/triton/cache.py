"""`cache.write` into caches of layout `nhd`: [page, slot, kv head, feature] as allocated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed_kernels_aok.triton.arith import narrow
from tokenspeed_kernels_aok.triton.launch import INTERPRETED, TRITON_DTYPES, Form, launch


@triton.jit
def _copy_heads(
    source, target, head_stride, slot_head_stride, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    head = lane // D
    feature = lane % D
    inside = lane < HEADS * D
    values = tl.load(source + head * head_stride + feature, mask=inside, other=0.0)
    if values.dtype != target.dtype.element_ty:
        values = narrow(values.to(tl.float32), target.dtype.element_ty, EMULATE)
    tl.store(target + head * slot_head_stride + feature, values, mask=inside)


@triton.jit
def write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    cache_page,
    cache_slot,
    cache_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        base = (slot // PAGE) * cache_page + (slot % PAGE) * cache_slot
        _copy_heads(k + token * k_token, k_cache + base, k_head, cache_head, HEADS, D, BLOCK, EMULATE)
        _copy_heads(v + token * v_token, v_cache + base, v_head, cache_head, HEADS, D, BLOCK, EMULATE)


def write(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store k and v ([T,Hkv,D]) in their slots (int64[T]); negative slots are skipped, each slot occurs once.

    Raises ValueError when the two caches differ in strides.
    """
    tokens, heads, head_dim = k.shape
    page, slot, head, _ = cache_strides(k_cache, v_cache)
    if tokens:
        launch(
            write_kernel,
            (tokens,),
            k_cache.device,
            k,
            v,
            k_cache,
            v_cache,
            slots,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            page,
            slot,
            head,
            HEADS=heads,
            D=head_dim,
            BLOCK=triton.next_power_of_2(heads * head_dim),
            PAGE=PAGE_SIZE,
            EMULATE=INTERPRETED,
            num_warps=4,
        )


def cache_strides(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, ...]:
    """The strides that both caches share, in elements. Raises ValueError when they share none."""
    if k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        raise ValueError(f"caches with strides {k_cache.stride()} and {v_cache.stride()}; expected equal, last one 1")
    return k_cache.stride()


def forms(target: str) -> Iterator[Form]:
    """One shape for each dtype of activations, stored as they are."""
    for dtype in TRITON_DTYPES.values():
        tensors = dict.fromkeys(("k", "v", "k_cache", "v_cache"), f"*{dtype}") | {"slots": "*i64"}
        names = ("k_token", "k_head", "v_token", "v_head", "cache_page", "cache_slot", "cache_head")
        yield Form(
            name=f"cache.write.{dtype}",
            target=target,
            kernel=write_kernel,
            signature=tensors | dict.fromkeys(names, "i32"),
            constants={"HEADS": 8, "D": 128, "BLOCK": 1024, "PAGE": PAGE_SIZE, "EMULATE": False},
            aligned=(*tensors, *names),
        )
