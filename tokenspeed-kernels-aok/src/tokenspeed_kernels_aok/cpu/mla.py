"""Attention over a compressed cache: `cache.write_latent` and `attention.mla_paged` (rule 11 of the bit order)."""

from __future__ import annotations

import ctypes
import struct

import torch

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed_kernels_aok.cpu.arguments import DTYPE_CODES, float_code, same_dtype, unit_stride
from tokenspeed_kernels_aok.cpu.library import KernelCall
from tokenspeed_kernels_aok.cpu.paged import beyond_cache, misfit, one_sequence, read_sequences
from tokenspeed_kernels_aok.cpu.selfcheck import checked, pattern

_WRITE = struct.Struct("11q")
_ATTENTION = struct.Struct("18qd2q")


def write_latent(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store latent [T,C] in the slots (int64[T], distinct; negative ones are skipped) of the cache [P,16,1,C].

    Raises TypeError unless both have one dtype, bf16 or fp32; ValueError for shapes that do not fit, or a slot beyond
    the cache (the others are written).
    """
    _, pages, width = check_cache(cache)
    same_dtype("latent", latent, cache.dtype)
    same_dtype("slots", slots, torch.int64)
    tokens = slots.shape[0]
    if latent.shape != (tokens, width):
        raise ValueError(f"latent is {list(latent.shape)}; expected {[tokens, width]} for {tokens} slots")
    latent, slots = unit_stride(latent), slots.contiguous()
    invalid = ctypes.c_int64(0)
    if tokens:
        _latent_write(
            _WRITE.pack(
                latent.data_ptr(), cache.data_ptr(), slots.data_ptr(), ctypes.addressof(invalid),
                tokens, width, pages, latent.stride(0), cache.stride(0), latent.itemsize, torch.get_num_threads(),
            )
        )  # fmt: skip
    if invalid.value:
        raise beyond_cache(slots, pages)


def mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    latent_dim: int,
) -> torch.Tensor:
    """Causal attention of q [T,Hq,C] over cached entries, whose first `latent_dim` values are also what is summed.

    [T,Hq,R], contiguous. The rest is as in `attention.paged`, and so are the errors.
    """
    code, pages, width = check_cache(cache)
    check_queries(q, cache)
    tokens, heads, _ = q.shape
    sequences = read_sequences(query_starts, context_lens, page_tables)
    starts, lengths, tables = sequences
    if not 0 < latent_dim <= width:
        raise ValueError(f"the cache is {list(cache.shape)}, the latent part {latent_dim}")
    q = unit_stride(q)
    out = q.new_empty(tokens, heads, latent_dim)
    invalid = ctypes.c_int64(0)
    if out.numel():
        _latent_attention(
            _ATTENTION.pack(
                q.data_ptr(), cache.data_ptr(), starts.data_ptr(), lengths.data_ptr(),
                tables.data_ptr(), out.data_ptr(), ctypes.addressof(invalid),
                tokens, len(lengths), heads, width, latent_dim, pages, q.stride(0), q.stride(1), cache.stride(0),
                tables.stride(0), tables.shape[1], scale, code, torch.get_num_threads(),
            )
        )  # fmt: skip
    if invalid.value:
        raise misfit(sequences, pages, tokens)
    return out


def check_queries(q: torch.Tensor, cache: torch.Tensor) -> None:
    """Raises TypeError and ValueError where dtype or shape do not fit the cache."""
    same_dtype("q", q, cache.dtype)
    if q.dim() != 3 or q.shape[2] != cache.shape[3]:
        raise ValueError(f"q is {list(q.shape)}, the cache {list(cache.shape)}")


def check_cache(cache: torch.Tensor) -> tuple[int, int, int]:
    """dtype code, pages and width of a cache [P,16,1,C], each page contiguous."""
    code = float_code("cache", cache)
    pages, slots, heads, width = cache.shape
    if slots != PAGE_SIZE or heads != 1 or width % 2:
        raise ValueError(f"cache is {list(cache.shape)}; expected [P,{PAGE_SIZE},1,C], C even")
    if cache.stride(1) != width or cache.stride(3) != 1:
        raise ValueError(f"the cache has strides {cache.stride()}; a page must be contiguous")
    return code, pages, width


# The self-check: one sequence of two chunks, more rows than lanes, a width that is no multiple of a vector.
_CHECKED_KEYS, _CHECKED_QUERIES, _CHECKED_HEADS, _CHECKED_WIDTH, _CHECKED_LATENT = 300, 4, 5, 86, 70


def _check_latent_write(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    slots, invalid = torch.tensor([17, -1, 2]), torch.zeros(1, dtype=torch.int64)
    for dtype in DTYPE_CODES:
        latent, cache = pattern(3, 6, dtype=dtype), torch.zeros(2, PAGE_SIZE, 1, 6, dtype=dtype)
        call(
            _WRITE.pack(
                latent.data_ptr(), cache.data_ptr(), slots.data_ptr(), invalid.data_ptr(), 3, 6, 2, 6, cache.stride(0),
                latent.itemsize, 1,
            )
        )  # fmt: skip
        outputs.append(cache)
    return tuple(outputs)


def _check_latent_attention(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    invalid = torch.zeros(1, dtype=torch.int64)
    starts, lengths, tables = one_sequence(_CHECKED_KEYS, _CHECKED_QUERIES)
    pages = tables.numel()
    for dtype, code in DTYPE_CODES.items():
        q = pattern(_CHECKED_QUERIES, _CHECKED_HEADS, _CHECKED_WIDTH, dtype=dtype)
        cache = pattern(pages, PAGE_SIZE, 1, _CHECKED_WIDTH, dtype=dtype, salt=3)
        out = torch.zeros(_CHECKED_QUERIES, _CHECKED_HEADS, _CHECKED_LATENT, dtype=dtype)
        call(
            _ATTENTION.pack(
                q.data_ptr(), cache.data_ptr(), starts.data_ptr(), lengths.data_ptr(), tables.data_ptr(),
                out.data_ptr(), invalid.data_ptr(), _CHECKED_QUERIES, 1, _CHECKED_HEADS, _CHECKED_WIDTH,
                _CHECKED_LATENT, pages, q.stride(0), q.stride(1), cache.stride(0), pages, pages, 0.25, code, 1,
            )
        )  # fmt: skip
        outputs.append(out)
    return tuple(outputs)


_latent_write = checked("latent_write", _WRITE, _check_latent_write)
_latent_attention = checked("latent_attention", _ATTENTION, _check_latent_attention)
