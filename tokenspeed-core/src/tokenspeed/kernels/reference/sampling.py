"""Sampling and log-probabilities, row by row.

What every kernel of `sampling.sample` computes for a row of logits, in fp32:

1. Widen the logits to fp32; z = logit / temperature (0 counts as 1). A row whose largest z is not finite (it holds NaN
   or +inf, or nothing but -inf) gives -1.
2. Temperature 0: the largest z, exact ties to the lowest id. The filters and the seed do not matter.
3. Otherwise the weight of a token is w = exp(z - max(z)), rounded (ties to even) to a multiple of 2^-40 and held as an
   integer, so the best weighs 2^40, sums are exact and their order does not matter.
4. The *order* of tokens is descending z, exact ties by ascending id. Every filter keeps a prefix of this order:
   - top-k keeps the first k (0, or at least V, keeps all): exactly k, whatever ties there are;
   - top-p looks at what top-k left, renormalised: S is the sum of the weights that top-k left; kept is the shortest
     prefix whose cumulative weight is >= p * S (both sums widened to fp64, one fp64 product). p >= 1 keeps all that
     top-k left;
   - min-p keeps z - max(z) >= log(min_p), which is relative to the largest probability, before or after any
     renormalisation. It does not change what top-p sees.
   The kept set is the shortest of the three prefixes, and never empty.
5. The token of the kept set with the largest z + gumbel(seed, position, id) in fp32, exact ties to the lowest id. The
   noise (`philox.py`) knows nothing of the row's place in the batch or of the other tokens.

The order of the filters is that of `transformers` (temperature, top-k, top-p, min-p); ties are cut by id, where
`transformers` keeps every tie of the k-th token. exp and log are the kernel's own, by its published bit order.
"""

from __future__ import annotations

import torch

from tokenspeed.kernels.reference.philox import gumbel

WEIGHT_UNIT = 2.0**40
"""Weight of the best token of a row, as an integer; top-p adds weights exactly."""


def _scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """fp32 logits over temperature, [R,V]; temperature 0 counts as 1."""
    divisor = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    return logits.to(torch.float32) / divisor.unsqueeze(-1)


def block_sumexp(logits: torch.Tensor, row_max: torch.Tensor, temperature: torch.Tensor, block: int) -> torch.Tensor:
    """Sum of exp(z - row_max) over each block of `block` vocabulary entries, fp32[R, ceil(V / block)].

    The last block is padded with exact zeros, so that every block is summed as one of full width.
    """
    terms = torch.exp(_scaled(logits, temperature) - row_max.unsqueeze(-1))
    terms = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % block))
    return terms.reshape(len(terms), terms.shape[-1] // block, block).sum(-1)


def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, order: str, block: int
) -> torch.Tensor:
    """Log-probabilities of `ids` (int64[R,M]) after temperature, over the whole vocabulary, fp32[R,M].

    `torch`: log_softmax. `megatron`: x = z - max; s = sum of the block sums, left to right; -(log(s) - x[id]).
    A negative id gives NaN. Raises ValueError for another order.
    """
    z = _scaled(logits, temperature)
    safe_ids = ids.clamp_min(0)
    if order == "torch":
        out = torch.log_softmax(z, dim=-1).gather(-1, safe_ids)
    elif order == "megatron":
        row_max = z.amax(-1)
        sums = block_sumexp(logits, row_max, temperature, block)
        total = sums[:, 0]
        for b in range(1, sums.shape[1]):
            total = total + sums[:, b]
        x = z.gather(-1, safe_ids) - row_max.unsqueeze(-1)
        out = -(torch.log(total).unsqueeze(-1) - x)
    else:
        raise ValueError(f"logprob order {order!r} is not one of torch, megatron")
    return out.masked_fill(ids < 0, torch.nan)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id for each row, int64[R]; see the module's docstring."""
    rows = [
        _sample_row(row, *settings)
        for row, *settings in zip(
            logits.to(torch.float32),
            temperature.tolist(),
            top_k.tolist(),
            top_p.tolist(),
            min_p.tolist(),
            seeds.tolist(),
            positions.tolist(),
            strict=True,
        )
    ]
    return torch.tensor(rows, dtype=torch.int64, device=logits.device)


def _sample_row(
    row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    z = row / torch.tensor(temperature or 1.0, dtype=torch.float32)
    if not torch.isfinite(z.amax()):
        return -1
    if temperature == 0:
        return _lowest_argmax(z)
    kept = kept_ids(z, top_k, top_p, min_p)
    return int(kept[_lowest_argmax(z[kept] + gumbel(seed, position, kept))])


def kept_ids(z: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Ids that the filters keep of one row of logits after temperature (fp32[V]), int64, ascending."""
    order = torch.sort(z, descending=True, stable=True).indices
    below_best = z - z.amax()
    count = top_k if 0 < top_k < len(order) else len(order)
    if top_p < 1:
        weights = torch.round(torch.exp(below_best[order[:count]]).double() * WEIGHT_UNIT).to(torch.int64)
        cumulative = weights.cumsum(0)
        count = int((cumulative.double() >= top_p * cumulative[-1].double()).nonzero()[0]) + 1
    if min_p > 0:
        count = min(count, int((below_best >= torch.tensor(min_p, dtype=torch.float32).log()).sum()))
    return order[: max(count, 1)].sort().values


def _lowest_argmax(values: torch.Tensor) -> int:
    """Index of the maximum; of several, the first."""
    return int((values == values.amax()).nonzero()[0])
