"""What one forward pass reads: flat ragged tokens, decode rows and prefill chunks side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class ForwardBatch:
    """Inputs of one forward pass; the scheduler fills it, layers only read it.

    `token_ids`, `positions`, `slots`: int64[T]. `query_starts`: int32[B+1]. `context_lens`: int32[B], this pass's
    tokens included. `page_tables`: int32[B, W]. `logits_rows`: int64[R], rows of the flat batch that need logits.
    `kv_caches`: for each layer the pair (k_cache, v_cache), each [P, 16, Hkv, D] with the kernel's own inner layout;
    where a layer keeps compressed entries, the second holds its indexer's keys or is empty.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    page_tables: torch.Tensor
    logits_rows: torch.Tensor
    kv_caches: list[tuple[torch.Tensor, torch.Tensor]]
