"""What the attention kernels share: their scratch space, and page tables as flashinfer wants them."""

from __future__ import annotations

import torch

from tokenspeed.kernels.operators import PAGE_SIZE

WORKSPACE_BYTES = 128 << 20
"""What flashinfer's documentation asks for: room for the partial results of split rows."""

_workspaces: dict[torch.device, torch.Tensor] = {}


def workspace(device: torch.device) -> torch.Tensor:
    """The scratch space of a device, uint8[WORKSPACE_BYTES], made once."""
    if device not in _workspaces:
        _workspaces[device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[device]


def ragged_pages(context_lens: torch.Tensor, page_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables int32[B,W] as (first page of each sequence, then their number, int32[B+1]; pages in a row, int32)."""
    pages = (context_lens + (PAGE_SIZE - 1)) // PAGE_SIZE
    starts = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    in_use = torch.arange(page_tables.shape[1], device=page_tables.device) < pages.unsqueeze(-1)
    return starts, page_tables[in_use]
