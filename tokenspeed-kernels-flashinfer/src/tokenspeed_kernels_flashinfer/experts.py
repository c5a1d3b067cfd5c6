"""`moe.experts` by flashinfer's segment GEMM: rows sorted by expert, two projections, a weighted sum.

`cutlass_fused_moe` is not used: it wants the up projection before the gate in every expert, and adds the outputs of a
token's experts by atomics.
"""

from __future__ import annotations

from typing import Any

import flashinfer
import torch

from tokenspeed_kernels_flashinfer.pages import workspace
from tokenspeed_kernels_flashinfer.rows import check_dtype, silu_and_mul


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, order: str
) -> torch.Tensor:
    """Sum over the slots of weight * expert(x), [T,H]; added up in fp32 by torch, each expert's output rounded before.

    Raises ValueError for another order than `rank`.
    """
    check_dtype("x", x)
    check_dtype("gate_up", gate_up, x)
    check_dtype("down", down, x)
    if order != "rank":
        raise ValueError(f"order {order!r}; these kernels leave the order of the sum to themselves (rank)")
    if gate_up.shape[-1] != x.shape[-1]:
        raise ValueError(f"x is {list(x.shape)}, gate_up {list(gate_up.shape)}")
    (tokens, hidden), (count, slots) = x.shape, (len(down), ids.shape[1])
    if not tokens:
        return torch.empty_like(x)
    # The identity (ids from `count` on) is sorted behind the experts; no segment holds its rows.
    expert = ids.reshape(-1).clamp_max(count).to(torch.int64)
    by_expert = torch.argsort(expert, stable=True)
    sizes = torch.zeros(count + 1, dtype=torch.int64, device=x.device).scatter_add_(0, expert, torch.ones_like(expert))
    starts = torch.nn.functional.pad(sizes[:count].cumsum(0), (1, 0))
    rows = x[by_expert // slots]
    wrapper: Any = flashinfer.SegmentGEMMWrapper(workspace(x.device))
    inner = silu_and_mul(wrapper.run(rows, gate_up, count, True, seg_indptr=starts))
    outputs = wrapper.run(inner, down, count, True, seg_indptr=starts)
    outputs = torch.where((expert[by_expert] == count).unsqueeze(-1), rows, outputs)
    in_place = torch.empty_like(outputs)
    in_place[by_expert] = outputs
    shares = in_place.view(tokens, slots, hidden).to(torch.float32) * weights.unsqueeze(-1)
    return shares.sum(1).to(x.dtype)
