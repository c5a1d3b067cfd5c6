"""The operators: named computations with fixed argument roles, layouts and a reference in plain torch.

An operator is data. The same description drives the documentation, the input generator and the conformance kit. This
module imports no torch.

Legend for shapes:

    T tokens in the batch (flat, ragged)   B sequences   R rows of logits   V vocabulary   H hidden size
    K, N       inner and outer size of a projection        F feed-forward size
    Hq, Hkv    query and key/value heads    D head size    P pages in the cache    S = 16 slots in a page
    G          groups of a batched projection (heads, as a rule)
    E, k       experts of a layer and experts chosen for a token; a chosen expert's place 0..k-1 is its slot
    C, R       width of a compressed KV entry (latent, then rotated key) and of its latent part
    Hi         heads of the indexer of sparse attention; k there is how many positions a query selects
    L          columns of index scores, one for each position: 16 * W
    W          width of the page table (pages of the longest sequence)

Common rules. Inputs have unit stride in their last axis; the other strides are free. An output is freshly allocated
and fully written. Empty inputs (T = 0) give empty outputs. A slot index is `page * 16 + offset`. A batch may be padded:
rows past `query_starts[-1]` belong to no sequence (their slot is -1, attention gives zeros for them), and a sequence
may have no row and a context of 0 tokens.
"""

from __future__ import annotations

from tokenspeed.kernels.operators.attention import ATTENTION
from tokenspeed.kernels.operators.dense import DENSE
from tokenspeed.kernels.operators.description import Argument, Operator
from tokenspeed.kernels.operators.moe import MIXTURE_OF_EXPERTS
from tokenspeed.kernels.operators.sampling import SAMPLING

__all__ = ["OPERATORS", "PAGE_SIZE", "Argument", "Operator"]

PAGE_SIZE = 16
"""Slots in a page of the KV cache."""

OPERATORS: dict[str, Operator] = {
    operator.name: operator for operator in (*DENSE, *ATTENTION, *MIXTURE_OF_EXPERTS, *SAMPLING)
}
