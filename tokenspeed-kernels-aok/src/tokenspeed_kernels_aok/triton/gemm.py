"""`gemm.linear` and `gemm.batched`: one persistent kernel, every output element in the same order for every M.

An element is one fp32 accumulator into which the matrix unit adds K in ascending steps of one instruction; K is padded
with zeros to the table's BLOCK_K. Bias is added in fp32 after the sum, then one rounding. There is no split-K: no
element's sum is ever cut by the grid. Which tile of the table serves a call changes no element's order (`tiles`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed.kernels.spec import Need
from tokenspeed_kernels_aok.triton.arith import dot, narrow
from tokenspeed_kernels_aok.triton.launch import (
    INTERPRETED,
    TRITON_DTYPES,
    Form,
    arch_of,
    check_dtypes,
    launch,
    multiprocessors,
)
from tokenspeed_kernels_aok.triton.tiles import GEMM, GEMM_FLOAT32, GemmTable, GemmTile

# Tiles that share columns run side by side, this many rows of tiles at a time, so that weights are read from L2.
_TILE_ROWS_TOGETHER = 8

# Rows of operands and of the output begin at multiples of so many elements. Triton knows no smaller alignment, and what
# it compiles for others loads and stores element by element, with more addresses than there are registers.
_UNIT = 16

_SIZES = ("groups", "rows", "columns", "width", "depth")


@triton.jit(do_not_specialize=["groups", "rows", "columns"])
def gemm_kernel(
    x,
    weight,
    bias,
    out,
    groups,
    rows,
    columns,
    width,
    depth,
    x_group,
    x_row,
    weight_group,
    weight_row,
    out_group,
    out_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PANELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """out[g] = x[g] @ weight[g].T (+ bias); x and weight are descriptors (one group only) or pointers.

    Rows of `out` have room for `width` columns; what is behind the `columns` of the product becomes 0.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N * PANELS)
    per_group = tiles_m * tiles_n
    k_lane = tl.arange(0, BLOCK_K)
    n_lane = tl.arange(0, BLOCK_N)
    for index in tl.range(tl.program_id(0), groups * per_group, tl.num_programs(0)):
        group = (index // per_group).to(tl.int64)
        tile = index % per_group
        band = tile // (TOGETHER * tiles_n)
        band_rows = tl.minimum(tiles_m - band * TOGETHER, TOGETHER)
        within = tile % (TOGETHER * tiles_n)
        m0 = (band * TOGETHER + within % band_rows) * BLOCK_M
        n0 = (within // band_rows) * (BLOCK_N * PANELS)
        m = m0 + tl.arange(0, BLOCK_M)

        totals = ()
        for _ in tl.static_range(PANELS):
            totals = totals + (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
        for k0 in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            k = k0 + k_lane
            if DESCRIPTORS:
                a = x.load([m0, k0])
            else:
                a = tl.load(
                    x + group * x_group + m.to(tl.int64)[:, None] * x_row + k[None, :],
                    mask=(m < rows)[:, None] & (k < depth)[None, :],
                    other=0.0,
                )
            sums = ()
            for panel in tl.static_range(PANELS):
                if DESCRIPTORS:
                    b = weight.load([n0 + panel * BLOCK_N, k0])
                else:
                    n = n0 + panel * BLOCK_N + n_lane
                    b = tl.load(
                        weight + group * weight_group + n.to(tl.int64)[:, None] * weight_row + k[None, :],
                        mask=(n < columns)[:, None] & (k < depth)[None, :],
                        other=0.0,
                    )
                sums = sums + (dot(a, b.T, totals[panel], EMULATE),)
            totals = sums

        for panel in tl.static_range(PANELS):
            n = n0 + panel * BLOCK_N + n_lane
            total = totals[panel]
            if HAS_BIAS:
                total += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
            tl.store(
                out + group * out_group + m.to(tl.int64)[:, None] * out_row + n[None, :],
                narrow(total, out.dtype.element_ty, EMULATE),
                mask=(m < rows)[:, None] & (n < width)[None, :],
            )


def prepare_linear(weight: torch.Tensor) -> torch.Tensor:
    """Weight [N,K] with unit stride along K and rows a multiple of 16 elements apart (padded when K is odd-sized)."""
    return _aligned(weight)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T,K] times the transpose of weight [N,K] (from `prepare_linear`), plus bias [N]: [T,N] in x's dtype.

    Raises TypeError for dtypes that differ or are not declared, ValueError for shapes that do not fit.
    """
    table = table_for(arch_of(x.device), x.dtype)
    return linear_by(table, table.choose(len(x), len(weight), multiprocessors(x.device)), x, weight, bias)


def linear_by(
    table: GemmTable, tile: GemmTile, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` with one tile of `table`: the same bits whichever tile of the table it is."""
    check_dtypes(x=x, weight=weight)
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        given = f" and bias {list(bias.shape)}" if bias is not None else ""
        raise ValueError(f"x {list(x.shape)} does not fit weight {list(weight.shape)}{given}")
    out = x.new_empty(len(x), _padded(len(weight)))
    if out.numel():
        _run(table, tile, x.unsqueeze(0), weight.unsqueeze(0), bias, out.unsqueeze(0), descriptors=table.descriptors)
    return _dense(out, len(weight))


def batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """For each group g: x[:, g] times the transpose of weight[g]; x [T,G,K], weight [G,N,K]: [T,G,N], contiguous.

    Raises TypeError for dtypes that differ or are not declared, ValueError for shapes that do not fit.
    """
    table = table_for(arch_of(x.device), x.dtype)
    groups, columns, _ = weight.shape
    return batched_by(table, table.choose(len(x), columns, multiprocessors(x.device), groups), x, weight)


def batched_by(table: GemmTable, tile: GemmTile, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`batched` with one tile of `table`: the same bits whichever tile of the table it is."""
    check_dtypes(x=x, weight=weight)
    if x.shape[1:] != weight.shape[::2]:
        raise ValueError(f"x {list(x.shape)} does not fit weight {list(weight.shape)}")
    groups, columns, _ = weight.shape
    out = x.new_empty(len(x), groups, _padded(columns))
    if out.numel():
        _run(table, tile, x.transpose(0, 1), weight, None, out.transpose(0, 1), descriptors=False)
    return _dense(out, columns)


def row_counts(need: Need, most: int) -> tuple[int, ...]:
    """Numbers of rows that between them choose every tile which the weight of `need` can meet on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    facts, dtypes = dict(need.facts), dict(need.dtypes)
    table = table_for(arch_of(device), getattr(torch, dtypes["x"]))
    counts = table.row_counts(int(facts["n"]), multiprocessors(device), int(facts.get("groups", 1)))
    return tuple(count for count in counts if count <= most)


def table_for(arch: str, dtype: torch.dtype) -> GemmTable:
    """The tile table for operands of `dtype` on `arch`."""
    return (GEMM_FLOAT32 if dtype == torch.float32 else GEMM)[arch]


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where its rows, along the last axis, are dense, apart and aligned; else a padded copy."""
    *outer, inner = tensor.stride()
    size = tensor.shape[-1]
    if inner == 1 and tensor.data_ptr() % 16 == 0 and all(step >= size and step % _UNIT == 0 for step in outer):
        return tensor
    padded = tensor.new_zeros(*tensor.shape[:-1], _padded(size))
    padded[..., :size] = tensor
    return padded[..., :size]


def _dense(out: torch.Tensor, size: int) -> torch.Tensor:
    """The first `size` columns, with strides as of a tensor that was made so, for one row too."""
    return out if out.shape[-1] == size else out[..., :size].clone(memory_format=torch.contiguous_format)


def _padded(size: int) -> int:
    return -(-size // _UNIT) * _UNIT


def _run(
    table: GemmTable,
    tile: GemmTile,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    descriptors: bool,
) -> None:
    """out [G,T,N or more] = x [G,T,K] @ weight [G,N,K] transposed, + bias [N]; `descriptors` only for one group."""
    x, weight = _aligned(x), _aligned(weight)
    groups, rows, depth = x.shape
    columns = weight.shape[1]
    tiles = groups * triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.columns)
    operands: tuple[Any, Any] = (x, weight)
    strides = (*_strides(x), *_strides(weight))
    if descriptors:
        # What descriptors hold is no argument, so that it has no part in what Triton compiles for.
        depth, strides = _padded(depth), (0, 0, 0, 0)
        operands = (
            TensorDescriptor.from_tensor(x[0], [tile.block_m, table.block_k]),
            TensorDescriptor.from_tensor(weight[0], [tile.block_n, table.block_k]),
        )
    launch(
        gemm_kernel,
        (min(tiles, tile.resident * multiprocessors(out.device)),),
        out.device,
        *operands,
        out if bias is None else bias,
        out,
        groups,
        rows,
        columns,
        out.shape[2],
        depth,
        *strides,
        *_strides(out),
        **_constants(table, tile, descriptors, bias is not None),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _strides(tensor: torch.Tensor) -> tuple[int, int]:
    """Of groups and rows. That of one group is 0, so that it does not grow with the rows."""
    return tensor.stride(0) if len(tensor) > 1 else 0, tensor.stride(1)


def _constants(table: GemmTable, tile: GemmTile, descriptors: bool, has_bias: bool) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PANELS": tile.panels,
        "BLOCK_K": table.block_k,
        "TOGETHER": _TILE_ROWS_TOGETHER,
        "STAGES": tile.num_stages,
        "DESCRIPTORS": descriptors,
        "HAS_BIAS": has_bias,
        "EMULATE": INTERPRETED,
    }


def forms(target: str) -> Iterator[Form]:
    """Every tile of the target's tables, with tensor descriptors where the table has them, and by pointers.

    By pointers also for a depth (K) that is no multiple of 16: the only other form that a call can take.
    """
    for dtype in TRITON_DTYPES.values():
        table = (GEMM_FLOAT32 if dtype == "fp32" else GEMM)[target]
        for tile in table.tiles:
            for kind in ("pointers", "pointers.odd", *(["descriptors"] if table.descriptors else [])):
                yield _form(target, table, tile, dtype, kind)


def _form(target: str, table: GemmTable, tile: GemmTile, dtype: str, kind: str) -> Form:
    descriptors = kind == "descriptors"
    if descriptors:
        operands = {
            "x": f"tensordesc<{dtype}[{tile.block_m},{table.block_k}]>",
            "weight": f"tensordesc<{dtype}[{tile.block_n},{table.block_k}]>",
        }
    else:
        operands = {"x": f"*{dtype}", "weight": f"*{dtype}"}
    strides = ("x_group", "x_row", "weight_group", "weight_row", "out_group", "out_row")
    pointers = {"bias": f"*{dtype}", "out": f"*{dtype}"}
    signature = operands | pointers | dict.fromkeys(_SIZES, "i32") | dict.fromkeys(strides, "i32")
    by_pointer = () if descriptors else ("x", "weight")
    depth = () if kind == "pointers.odd" else ("depth",)
    return Form(
        name=f"gemm.{dtype}.{tile.block_m}x{tile.columns}.{kind}",
        target=target,
        kernel=gemm_kernel,
        signature=signature,
        constants=_constants(table, tile, descriptors, True) | {"EMULATE": False},
        aligned=(*by_pointer, "bias", "out", "width", *depth, *strides),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        tags=frozenset({table.instruction}),
    )
