"""`cache.write` and `attention.paged` (rule 3 of the bit order), over pages in the layout `aok_pairs` (kv_layout.h)."""

from __future__ import annotations

import ctypes
import struct

import torch

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed_kernels_aok.cpu.arguments import DTYPE_CODES, float_code, same_dtype, unit_stride
from tokenspeed_kernels_aok.cpu.library import KernelCall
from tokenspeed_kernels_aok.cpu.paged import beyond_cache, misfit, one_sequence, read_sequences
from tokenspeed_kernels_aok.cpu.selfcheck import checked, pattern

_CACHE_WRITE = struct.Struct("18q")
_ATTENTION = struct.Struct("20qd3q")


def cache_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store k and v ([T,Hkv,D]) in their slots (int64[T], distinct; negative ones are skipped) of the caches.

    Raises TypeError unless all have one dtype, bf16 or fp32; ValueError for shapes that do not fit, an odd D, or a slot
    beyond the cache (the others are written).
    """
    code, pages, kv_heads, d = _check_caches(k_cache, v_cache)
    same_dtype("k", k, k_cache.dtype)
    same_dtype("v", v, k_cache.dtype)
    same_dtype("slots", slots, torch.int64)
    tokens = slots.shape[0]
    if k.shape != (tokens, kv_heads, d) or v.shape != k.shape:
        raise ValueError(
            f"k is {list(k.shape)}, v {list(v.shape)}; expected {[tokens, kv_heads, d]} "
            f"for {tokens} slots and caches of {list(k_cache.shape)}"
        )
    k, v, slots = unit_stride(k), unit_stride(v), slots.contiguous()
    invalid = ctypes.c_int64(0)
    if tokens and kv_heads and d:
        _cache_write(
            _CACHE_WRITE.pack(
                k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(),
                ctypes.addressof(invalid), tokens, kv_heads, d, pages,
                k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_cache.stride(0), v_cache.stride(0),
                code, torch.get_num_threads(),
            )
        )  # fmt: skip
    if invalid.value:
        raise beyond_cache(slots, pages)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of the ragged queries q [T,Hq,D] over the cached keys of their sequences: [T,Hq,D], contiguous.

    Query i of sequence b stands at position context_lens[b] - n_b + i and sees the keys up to its own position, with a
    window only the last `window` of them. Rows past query_starts[-1] are zero. `query_starts` int32[B+1],
    `context_lens` int32[B], `page_tables` int32[B,W]; entries past a context are not read.
    Raises TypeError unless q and the caches have one dtype, bf16 or fp32; ValueError for shapes that do not fit, an odd
    D, a context shorter than its queries or longer than its page table, or a page beyond the cache.
    """
    code, pages, kv_heads, d = _check_caches(k_cache, v_cache)
    same_dtype("q", q, k_cache.dtype)
    tokens, q_heads, q_d = q.shape
    if q_d != d or (q_heads % kv_heads if kv_heads else q_heads):
        raise ValueError(
            f"q is {list(q.shape)}, the caches {list(k_cache.shape)}: heads must be a multiple, D the same"
        )
    if window < 0:
        raise ValueError(f"window is {window}; expected 0 (no window) or a number of keys")
    sequences = read_sequences(query_starts, context_lens, page_tables)
    starts, lengths, tables = sequences
    q = unit_stride(q)
    out = torch.empty((tokens, q_heads, d), dtype=q.dtype)
    invalid = ctypes.c_int64(0)
    if tokens and q_heads and d:
        _attention(
            _ATTENTION.pack(
                q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), starts.data_ptr(), lengths.data_ptr(),
                tables.data_ptr(), out.data_ptr(), ctypes.addressof(invalid),
                tokens, len(lengths), q_heads, kv_heads, d, pages, q.stride(0), q.stride(1),
                k_cache.stride(0), v_cache.stride(0), tables.stride(0), tables.shape[1],
                scale, window, code, torch.get_num_threads(),
            )
        )  # fmt: skip
    if invalid.value:
        raise misfit(sequences, pages, tokens)
    return out


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, int, int, int]:
    """dtype code, pages, kv heads and head size of two caches [P,16,Hkv,D], each page contiguous."""
    code = float_code("k_cache", k_cache)
    same_dtype("v_cache", v_cache, k_cache.dtype)
    shape = k_cache.shape
    pages, slots, kv_heads, d = shape
    inner = (kv_heads * d, d, 1)
    if shape != v_cache.shape or slots != PAGE_SIZE or d % 2:
        raise ValueError(
            f"k_cache is {list(k_cache.shape)}, v_cache {list(v_cache.shape)}; expected [P,{PAGE_SIZE},Hkv,D], D even"
        )
    if k_cache.stride()[1:] != inner or v_cache.stride()[1:] != inner:
        raise ValueError(f"a cache has strides {k_cache.stride()}, {v_cache.stride()}; a page must be contiguous")
    return code, pages, kv_heads, d


# The self-check: one sequence of two chunks, a window, a group of two heads, a narrow last block of columns.
_CHECKED_KEYS, _CHECKED_QUERIES, _CHECKED_HEAD = 300, 3, 44


def _check_cache_write(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    slots, invalid = torch.tensor([17, -1, 2]), torch.zeros(1, dtype=torch.int64)
    for dtype, code in DTYPE_CODES.items():
        k, v = (pattern(3, 1, _CHECKED_HEAD, dtype=dtype, salt=salt) for salt in (0, 3))
        caches = torch.zeros(2, 2, PAGE_SIZE, 1, _CHECKED_HEAD, dtype=dtype)
        page = caches.stride(1)
        call(
            _CACHE_WRITE.pack(
                k.data_ptr(), v.data_ptr(), caches[0].data_ptr(), caches[1].data_ptr(), slots.data_ptr(),
                invalid.data_ptr(), 3, 1, _CHECKED_HEAD, 2,
                _CHECKED_HEAD, _CHECKED_HEAD, _CHECKED_HEAD, _CHECKED_HEAD, page, page, code, 1,
            )
        )  # fmt: skip
        outputs.append(caches)
    return tuple(outputs)


def _check_attention(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    invalid = torch.zeros(1, dtype=torch.int64)
    starts, lengths, tables = one_sequence(_CHECKED_KEYS, _CHECKED_QUERIES)
    pages = tables.numel()
    for dtype, code in DTYPE_CODES.items():
        q = pattern(_CHECKED_QUERIES, 2, _CHECKED_HEAD, dtype=dtype)
        k_cache, v_cache = (pattern(pages, PAGE_SIZE, _CHECKED_HEAD, dtype=dtype, salt=salt) for salt in (3, 5))
        for window in (0, 280):
            out = torch.zeros_like(q)
            call(
                _ATTENTION.pack(
                    q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), starts.data_ptr(), lengths.data_ptr(),
                    tables.data_ptr(), out.data_ptr(), invalid.data_ptr(),
                    _CHECKED_QUERIES, 1, 2, 1, _CHECKED_HEAD, pages, q.stride(0), q.stride(1),
                    k_cache.stride(0), v_cache.stride(0), pages, pages, 0.25, window, code, 1,
                )
            )  # fmt: skip
            outputs.append(out)
    return tuple(outputs)


_cache_write = checked("cache_write", _CACHE_WRITE, _check_cache_write)
_attention = checked("attention", _ATTENTION, _check_attention)
