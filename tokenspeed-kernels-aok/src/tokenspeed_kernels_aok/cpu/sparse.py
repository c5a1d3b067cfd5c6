"""Sparse attention: `attention.index_scores`, `attention.index_topk` and `attention.sparse_paged` (rules 12 to 14)."""

from __future__ import annotations

import ctypes
import struct

import torch

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed_kernels_aok.cpu.arguments import DTYPE_CODES, same_dtype, unit_stride
from tokenspeed_kernels_aok.cpu.library import KernelCall
from tokenspeed_kernels_aok.cpu.mla import check_cache, check_queries
from tokenspeed_kernels_aok.cpu.paged import misfit, one_sequence, read_sequences
from tokenspeed_kernels_aok.cpu.selfcheck import checked, pattern

_SCORES = struct.Struct("20qd2q")
_TOPK = struct.Struct("8q")
_ATTENTION = struct.Struct("22qd2q")

ORDERS = ("selection", "sorted")


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """fp32[T,16W]: sum over the heads of weights [T,Hi] * max(q . key * scale, 0) for q [T,Hi,C]; -inf where unseen.

    Raises TypeError for other dtypes, ValueError for shapes, lengths and pages that do not fit.
    """
    code, pages, width = check_cache(cache)
    check_queries(q, cache)
    sequences = read_sequences(query_starts, context_lens, page_tables)
    starts, lengths, tables = sequences
    same_dtype("weights", weights, torch.float32)
    tokens, heads, _ = q.shape
    if weights.shape != (tokens, heads):
        raise ValueError(f"weights is {list(weights.shape)}, expected {[tokens, heads]}")
    q, weights = unit_stride(q), unit_stride(weights)
    columns = PAGE_SIZE * tables.shape[1]
    scores = weights.new_empty(tokens, columns)
    invalid = ctypes.c_int64(0)
    if scores.numel():
        _index_scores(
            _SCORES.pack(
                q.data_ptr(), weights.data_ptr(), cache.data_ptr(), starts.data_ptr(), lengths.data_ptr(),
                tables.data_ptr(), scores.data_ptr(), ctypes.addressof(invalid),
                tokens, len(lengths), heads, width, pages, columns,
                q.stride(0), q.stride(1), weights.stride(0), cache.stride(0),
                tables.stride(0), tables.shape[1], scale, code, torch.get_num_threads(),
            )
        )  # fmt: skip
    if invalid.value:
        raise misfit(sequences, pages, tokens)
    return scores


def index_topk(scores: torch.Tensor, positions: torch.Tensor, top_k: int) -> torch.Tensor:
    """int32[T,k]: the positions of the k best of scores fp32[T,L] up to each row's position, best first, then -1.

    Raises TypeError for other dtypes, ValueError for shapes that do not fit.
    """
    same_dtype("scores", scores, torch.float32)
    same_dtype("positions", positions, torch.int64)
    tokens, columns = scores.shape
    if positions.shape != (tokens,) or top_k < 1:
        raise ValueError(f"positions is {list(positions.shape)} for {tokens} rows, top_k is {top_k}")
    scores, positions = unit_stride(scores), positions.contiguous()
    indices = scores.new_empty(tokens, top_k, dtype=torch.int32)
    if tokens:
        _index_topk(
            _TOPK.pack(
                scores.data_ptr(), positions.data_ptr(), indices.data_ptr(), tokens, columns, top_k, scores.stride(0),
                torch.get_num_threads(),
            )
        )  # fmt: skip
    return indices


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    latent_dim: int,
    order: str,
) -> torch.Tensor:
    """Attention of q [T,Hq,C] over the entries at the positions indices [T,k], up to the first negative one: [T,Hq,R].

    `sorted` reduces them in ascending position, `selection` as they come. Raises TypeError for other dtypes, ValueError
    for shapes, lengths, positions and pages that do not fit, and for another order.
    """
    code, pages, width = check_cache(cache)
    check_queries(q, cache)
    sequences = read_sequences(query_starts, context_lens, page_tables)
    starts, lengths, tables = sequences
    same_dtype("indices", indices, torch.int32)
    tokens, heads, _ = q.shape
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is not one of {', '.join(ORDERS)}")
    if not 0 < latent_dim <= width:
        raise ValueError(f"the cache is {list(cache.shape)}, the latent part {latent_dim}")
    if indices.dim() != 2 or len(indices) != tokens:
        raise ValueError(f"indices is {list(indices.shape)}, expected {[tokens, 'k']}")
    q, indices = unit_stride(q), unit_stride(indices)
    out = q.new_empty(tokens, heads, latent_dim)
    invalid = ctypes.c_int64(0)
    if out.numel():
        _sparse_attention(
            _ATTENTION.pack(
                q.data_ptr(), cache.data_ptr(), indices.data_ptr(), starts.data_ptr(), lengths.data_ptr(),
                tables.data_ptr(), out.data_ptr(), ctypes.addressof(invalid),
                tokens, len(lengths), heads, width, latent_dim, indices.shape[1], pages,
                q.stride(0), q.stride(1), cache.stride(0), indices.stride(0),
                tables.stride(0), tables.shape[1], order == "sorted", scale, code, torch.get_num_threads(),
            )
        )  # fmt: skip
    if invalid.value:
        if tokens and (found := int(indices.max())) >= int(lengths.max()):
            raise ValueError(f"indices reach position {found}; the longest context has {int(lengths.max())}")
        raise misfit(sequences, pages, tokens)
    return out


# The self-check: a sequence of two chunks, more heads than lanes, sizes that are no multiple of a vector.
_CHECKED_KEYS, _CHECKED_QUERIES, _CHECKED_HEADS, _CHECKED_WIDTH, _CHECKED_LATENT = 300, 3, 21, 38, 22
_CHECKED_PAGES = -(-_CHECKED_KEYS // PAGE_SIZE)


def _check_scores(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    invalid = torch.zeros(1, dtype=torch.int64)
    sequence = one_sequence(_CHECKED_KEYS, _CHECKED_QUERIES)
    weights = pattern(_CHECKED_QUERIES, _CHECKED_HEADS, dtype=torch.float32, salt=7)
    for dtype, code in DTYPE_CODES.items():
        q = pattern(_CHECKED_QUERIES, _CHECKED_HEADS, _CHECKED_WIDTH, dtype=dtype)
        cache = pattern(_CHECKED_PAGES, PAGE_SIZE, 1, _CHECKED_WIDTH, dtype=dtype, salt=3)
        scores = torch.zeros(_CHECKED_QUERIES, PAGE_SIZE * _CHECKED_PAGES)
        call(
            _SCORES.pack(
                q.data_ptr(), weights.data_ptr(), cache.data_ptr(), *(x.data_ptr() for x in sequence),
                scores.data_ptr(), invalid.data_ptr(), _CHECKED_QUERIES, 1, _CHECKED_HEADS, _CHECKED_WIDTH,
                _CHECKED_PAGES, scores.shape[1], q.stride(0), q.stride(1), _CHECKED_HEADS, cache.stride(0),
                _CHECKED_PAGES, _CHECKED_PAGES, 0.25, code, 1,
            )
        )  # fmt: skip
        outputs.append(scores)
    return tuple(outputs)


def _check_topk(call: KernelCall) -> tuple[torch.Tensor, ...]:
    scores, positions = pattern(3, 90, dtype=torch.float32), torch.tensor([89, 40, 3])
    scores[:, ::5] = scores[0, 2]
    indices = torch.zeros(3, 17, dtype=torch.int32)
    call(_TOPK.pack(scores.data_ptr(), positions.data_ptr(), indices.data_ptr(), 3, 90, 17, 90, 1))
    return (indices,)


def _check_attention(call: KernelCall) -> tuple[torch.Tensor, ...]:
    outputs = []
    invalid = torch.zeros(1, dtype=torch.int64)
    sequence = one_sequence(_CHECKED_KEYS, _CHECKED_QUERIES)
    indices = (torch.arange(_CHECKED_QUERIES * 270, dtype=torch.int32) * 7 % _CHECKED_KEYS).view(_CHECKED_QUERIES, 270)
    for dtype, code in DTYPE_CODES.items():
        q = pattern(_CHECKED_QUERIES, _CHECKED_HEADS, _CHECKED_WIDTH, dtype=dtype)
        cache = pattern(_CHECKED_PAGES, PAGE_SIZE, 1, _CHECKED_WIDTH, dtype=dtype, salt=3)
        for is_sorted in (0, 1):
            out = torch.zeros(_CHECKED_QUERIES, _CHECKED_HEADS, _CHECKED_LATENT, dtype=dtype)
            call(
                _ATTENTION.pack(
                    q.data_ptr(), cache.data_ptr(), indices.data_ptr(), *(x.data_ptr() for x in sequence),
                    out.data_ptr(), invalid.data_ptr(), _CHECKED_QUERIES, 1, _CHECKED_HEADS, _CHECKED_WIDTH,
                    _CHECKED_LATENT, 270, _CHECKED_PAGES, q.stride(0), q.stride(1), cache.stride(0), 270,
                    _CHECKED_PAGES, _CHECKED_PAGES, is_sorted, 0.25, code, 1,
                )
            )  # fmt: skip
            outputs.append(out)
    return tuple(outputs)


_index_scores = checked("index_scores", _SCORES, _check_scores)
_index_topk = checked("index_topk", _TOPK, _check_topk)
_sparse_attention = checked("sparse_attention", _ATTENTION, _check_attention)
