"""`sampling.sample` from flashinfer's own stream: the trait `stream=batch`.

Seeds and positions are handed on, but a row's place in the batch feeds flashinfer's generator as well. Of tokens that
tie at the edge of top-k, any number may be kept. Greedy rows are exact.
"""

from __future__ import annotations

import flashinfer
import torch

from tokenspeed_kernels_flashinfer.rows import HALVES

LARGEST_SEED = (1 << 63) - 1


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id for each row of logits [R,V], int64[R]; -1 where a row holds NaN or nothing finite."""
    if logits.dtype not in (*HALVES, torch.float32):
        raise TypeError(f"logits: {logits.dtype}; this sampler takes bfloat16, float16 and float32")
    count, vocab_size = logits.shape
    if not count:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    wide = logits.to(torch.float32).contiguous()
    best = wide.amax(-1)
    usable = best.isfinite()
    ids = torch.arange(vocab_size, device=logits.device)
    greedy = ids.where(wide == best.unsqueeze(-1), vocab_size).amin(-1)
    is_greedy = (temperature == 0) | ~usable
    # Rows without a distribution get an even one, whose draw nobody reads.
    wide = torch.where(usable.unsqueeze(-1), wide, 0.0)
    probabilities = flashinfer.softmax(wide, torch.where(is_greedy, 1.0, temperature))
    # flashinfer takes 0 < k < V and 0 < p < 1; rows without a filter are put back.
    filtered = flashinfer.top_k_renorm_probs(probabilities, top_k.clamp(1, max(vocab_size - 1, 1)))
    probabilities = torch.where(((top_k > 0) & (top_k < vocab_size)).unsqueeze(-1), filtered, probabilities)
    filtered = flashinfer.top_p_renorm_probs(probabilities, torch.where(top_p < 1, top_p, 0.5))
    probabilities = torch.where((top_p < 1).unsqueeze(-1), filtered, probabilities)
    drawn = flashinfer.min_p_sampling_from_probs(probabilities, min_p, seed=seeds & LARGEST_SEED, offset=positions)
    return torch.where(usable, torch.where(is_greedy, greedy, drawn.to(torch.int64)), -1)
