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

from dataclasses import dataclass

PAGE_SIZE = 16
"""Slots in a page of the KV cache."""


@dataclass(frozen=True)
class Argument:
    """One argument: `role` is the name that kernels and dtype signatures use, `shape` its axes, `dtype` fixed or free.

    A free dtype is written `$role` and is chosen by the signature; `optional` arguments may be None.
    """

    role: str
    shape: str
    dtype: str
    meaning: str
    optional: bool = False


@dataclass(frozen=True)
class Operator:
    """One computation that kernels implement.

    `call` is the Python call form. `weights` are the roles that `prepare_weights` may repack once at load; the kernel
    then receives what it returned. `links` are traits whose value must be the same for every operator of the plan that
    carries the trait (the layout of the KV cache). `agreement` is the largest relative error against the reference that
    the conformance kit accepts, for each output dtype.
    """

    name: str
    summary: str
    call: str
    arguments: tuple[Argument, ...]
    returns: tuple[Argument, ...]
    reference: str
    weights: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    agreement: tuple[tuple[str, float], ...] = (("float32", 2e-5), ("bfloat16", 1.6e-2), ("float16", 2e-3))


def _arg(role: str, shape: str, dtype: str, meaning: str, optional: bool = False) -> Argument:
    return Argument(role, shape, dtype, meaning, optional)


_REFERENCE = "tokenspeed.kernels.reference"

_KV = (
    _arg("k_cache", "P,S,Hkv,D", "$kv", "keys of one layer; the inside of a page is the kernel's own `kv_layout`"),
    _arg("v_cache", "P,S,Hkv,D", "$kv", "values of one layer, likewise"),
)

_SEQUENCES = (
    _arg("query_starts", "B+1", "int32", "first row of each sequence in q, then T"),
    _arg("context_lens", "B", "int32", "tokens of each sequence in the cache, this call's queries included"),
    _arg("page_tables", "B,W", "int32", "page of each 16 positions; entries past the context are unspecified"),
    _arg("scale", "", "float", "multiplies q.k"),
)

_LATENT = _arg("cache", "P,S,1,C", "$kv", "compressed entries of one layer, in this order on every kernel")

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(
            "embedding.lookup",
            "Rows of the embedding table.",
            "embedding(ids, weight) -> out",
            (_arg("ids", "T", "int64", "token ids"), _arg("weight", "V,H", "$weight", "embedding table")),
            (_arg("out", "T,H", "$weight", "embeddings"),),
            f"{_REFERENCE}.embedding:lookup",
            weights=("weight",),
        ),
        Operator(
            "gemm.linear",
            "x times the transpose of weight, plus bias; fp32 accumulation, one rounding to the output dtype.",
            "linear(x, weight, bias=None) -> out",
            (
                _arg("x", "T,K", "$x", "activations"),
                _arg("weight", "N,K", "$weight", "weights, one row for each output"),
                _arg("bias", "N", "$weight", "bias", optional=True),
            ),
            (_arg("out", "T,N", "$x", "projection"),),
            f"{_REFERENCE}.gemm:linear",
            weights=("weight",),
            facts=("k", "n"),
        ),
        Operator(
            "gemm.batched",
            "For each of G groups, its columns of x times the transpose of its weight; like gemm.linear in arithmetic.",
            "batched(x, weight) -> out",
            (
                _arg("x", "T,G,K", "$x", "activations; token and group strides are free"),
                _arg("weight", "G,N,K", "$weight", "one weight for each group"),
            ),
            (_arg("out", "T,G,N", "$x", "projections, contiguous"),),
            f"{_REFERENCE}.gemm:batched",
            weights=("weight",),
            facts=("groups", "k", "n"),
        ),
        Operator(
            "norm.rms",
            "Root-mean-square norm over the last axis, statistics in fp32.",
            "rms_norm(x, weight, eps) -> out",
            (
                _arg("x", "T,H or T,heads,D", "$x", "activations; row and head strides are free"),
                _arg("weight", "H or D", "$weight", "scale; applied after x/rms was rounded to x's dtype"),
                _arg("eps", "", "float", "added to the mean square"),
            ),
            (_arg("out", "as x", "$x", "normalised, contiguous"),),
            f"{_REFERENCE}.norm:rms",
            facts=("hidden",),
        ),
        Operator(
            "norm.add_rms",
            "x + residual, and the norm of the unrounded fp32 sum; for `auto` only.",
            "add_rms_norm(x, residual, weight, eps) -> (out, sum)",
            (
                _arg("x", "T,H", "$x", "activations"),
                _arg("residual", "T,H", "$x", "residual stream"),
                _arg("weight", "H", "$weight", "scale"),
                _arg("eps", "", "float", "added to the mean square"),
            ),
            (_arg("out", "T,H", "$x", "norm of the sum"), _arg("sum", "T,H", "$x", "the sum, rounded once")),
            f"{_REFERENCE}.norm:add_rms",
            facts=("hidden",),
        ),
        Operator(
            "norm.layer",
            "(x - mean) / standard deviation, times weight, plus bias; in fp32 with one rounding.",
            "layer_norm(x, weight, bias, eps) -> out",
            (
                _arg("x", "T,H", "$x", "activations"),
                _arg("weight", "H", "$weight", "scale"),
                _arg("bias", "H", "$weight", "what is added last"),
                _arg("eps", "", "float", "added to the variance"),
            ),
            (_arg("out", "T,H", "$x", "normalised, contiguous"),),
            f"{_REFERENCE}.norm:layer",
            facts=("hidden",),
        ),
        Operator(
            "rope.apply",
            "Rotary position embedding of queries and keys, computed in fp32 with one rounding.",
            "rope(q, k, positions, cos_sin, interleaved=False) -> (q_out, k_out)",
            (
                _arg("q", "T,Hq,D", "$x", "queries"),
                _arg("k", "T,Hkv,D", "$x", "keys"),
                _arg("positions", "T", "int64", "absolute positions"),
                _arg(
                    "cos_sin", "positions,R", "float32", "R/2 cosines then R/2 sines for each position; R <= D rotated"
                ),
                _arg("interleaved", "", "bool", "pairs (2i, 2i+1) instead of (i, i + R/2)"),
            ),
            (_arg("q_out", "T,Hq,D", "$x", "rotated queries"), _arg("k_out", "T,Hkv,D", "$x", "rotated keys")),
            f"{_REFERENCE}.rope:apply",
            facts=("head_dim", "rotary_dim"),
        ),
        Operator(
            "activation.silu_and_mul",
            "silu(gate) * up in fp32 with one rounding.",
            "silu_and_mul(gate_up) -> out",
            (_arg("gate_up", "T,2F", "$x", "gate in the first half of a row, up in the second"),),
            (_arg("out", "T,F", "$x", "activation"),),
            f"{_REFERENCE}.activation:silu_and_mul",
        ),
        Operator(
            "cache.write",
            "Store keys and values in their slots.",
            "cache_write(k, v, k_cache, v_cache, slots) -> None",
            (
                _arg("k", "T,Hkv,D", "$x", "keys, rotated"),
                _arg("v", "T,Hkv,D", "$x", "values"),
                *_KV,
                _arg("slots", "T", "int64", "where each token goes; a negative slot is skipped"),
            ),
            (),
            f"{_REFERENCE}.cache:write",
            links=("kv_layout",),
            facts=("head_dim",),
        ),
        Operator(
            "attention.paged",
            "Causal attention of ragged queries over the paged cache; prefill chunks and decode rows in one call.",
            "attention(q, k_cache, v_cache, query_starts, context_lens, page_tables, scale, window=0) -> out",
            (
                _arg(
                    "q", "T,Hq,D", "$x", "queries, rotated; query i of sequence b stands at context_lens[b] - n_b + i"
                ),
                *_KV,
                *_SEQUENCES,
                _arg("window", "", "int", "keys seen by a query, itself included; 0 sees all"),
            ),
            (_arg("out", "T,Hq,D", "$x", "attention output, contiguous"),),
            f"{_REFERENCE}.attention:paged",
            links=("kv_layout",),
            facts=("head_dim", "group_size"),
        ),
        Operator(
            "cache.write_latent",
            "Store compressed entries (latent, then rotated key) in their slots.",
            "cache_write_latent(latent, cache, slots) -> None",
            (
                _arg("latent", "T,C", "$x", "one entry for each token"),
                _LATENT,
                _arg("slots", "T", "int64", "where each token goes; a negative slot is skipped"),
            ),
            (),
            f"{_REFERENCE}.mla:write_latent",
            facts=("width",),
        ),
        Operator(
            "attention.mla_paged",
            "Causal attention over compressed entries that all heads share: an entry is the key, its latent part the "
            "value.",
            "mla(q, cache, query_starts, context_lens, page_tables, scale, latent_dim) -> out",
            (
                _arg(
                    "q", "T,Hq,C", "$x", "queries: the absorbed part, then the rotated one; places as attention.paged"
                ),
                _LATENT,
                *_SEQUENCES,
                _arg("latent_dim", "", "int", "R, the first values of an entry that are summed"),
            ),
            (_arg("out", "T,Hq,R", "$x", "attention output in the latent space, contiguous"),),
            f"{_REFERENCE}.mla:attention",
            facts=("heads", "latent_dim", "width"),
        ),
        Operator(
            "attention.index_scores",
            "Scores of the lightning indexer: sum over its heads of weight * relu(q.k * scale), in fp32.",
            "index_scores(q, weights, cache, query_starts, context_lens, page_tables, scale) -> scores",
            (
                _arg("q", "T,Hi,C", "$x", "queries of the indexer, rotated; places as attention.paged"),
                _arg("weights", "T,Hi", "float32", "weight of each head of each query, of any sign"),
                _LATENT,
                *_SEQUENCES,
            ),
            (_arg("scores", "T,L", "float32", "score of each position, -infinity where the query does not see it"),),
            f"{_REFERENCE}.sparse:index_scores",
            facts=("index_heads", "width"),
        ),
        Operator(
            "attention.index_topk",
            "The k positions of largest score that each query sees; a row's choice depends on that row alone.",
            "index_topk(scores, positions, top_k) -> indices",
            (
                _arg("scores", "T,L", "float32", "score of each position; what lies past a row's position is ignored"),
                _arg("positions", "T", "int64", "where each query stands; it sees positions 0 to its own"),
                _arg("top_k", "", "int", "k, positions to choose"),
            ),
            (
                _arg(
                    "indices",
                    "T,k",
                    "int32",
                    "chosen positions, best first: NaN, then falling scores, equal ones (-0 and +0 too) by ascending "
                    "position; -1 where there are fewer",
                ),
            ),
            f"{_REFERENCE}.sparse:index_topk",
            facts=("top_k",),
        ),
        Operator(
            "attention.sparse_paged",
            "attention.mla_paged of each query over the positions that were selected for it, and no others.",
            "sparse(q, cache, indices, query_starts, context_lens, page_tables, scale, latent_dim, order) -> out",
            (
                _arg(
                    "q", "T,Hq,C", "$x", "queries: the absorbed part, then the rotated one; places as attention.paged"
                ),
                _LATENT,
                _arg("indices", "T,k", "int32", "positions of each query's sequence, distinct; -1 fills up at the end"),
                *_SEQUENCES,
                _arg("latent_dim", "", "int", "R, the first values of an entry that are summed"),
                _arg(
                    "order",
                    "",
                    "str",
                    "`sorted` reduces in ascending position, whatever the pages; `selection` as the indices come",
                ),
            ),
            (_arg("out", "T,Hq,R", "$x", "attention output in the latent space, contiguous; 0 without positions"),),
            f"{_REFERENCE}.sparse:attention",
            facts=("heads", "latent_dim", "width"),
        ),
        Operator(
            "moe.route",
            "The k experts of each token and their weights, all in fp32.",
            "route(logits, bias, top_k, scoring, form, normalise=True, scale=1.0, groups=1, top_groups=1) "
            "-> (weights, ids)",
            (
                _arg("logits", "T,E", "$logits", "router logits, widened to fp32"),
                _arg("bias", "E", "float32", "added to the scores for the choice only", optional=True),
                _arg("top_k", "", "int", "experts for each token"),
                _arg("scoring", "", "str", "`softmax` over E, or `sigmoid` of each logit"),
                _arg("form", "", "str", "`torch` or `fused`: reference.moe says what each computes"),
                _arg("normalise", "", "bool", "divide the chosen scores by their sum + 1e-20"),
                _arg("scale", "", "float", "multiplies the weights at the end"),
                _arg("groups", "", "int", "equal groups of neighbouring experts"),
                _arg(
                    "top_groups",
                    "",
                    "int",
                    "only experts of so many groups are eligible: those whose two best add up to most",
                ),
            ),
            (
                _arg("weights", "T,k", "float32", "scores (without bias) of the chosen, best choice first"),
                _arg("ids", "T,k", "int32", "chosen experts, equal scores by ascending expert"),
            ),
            f"{_REFERENCE}.moe:route",
            facts=("experts", "top_k"),
        ),
        Operator(
            "moe.experts",
            "Weighted sum of the chosen experts' gated MLPs; reads the weights of chosen experts only.",
            "experts(x, gate_up, down, weights, ids, order) -> out",
            (
                _arg("x", "T,H", "$x", "activations"),
                _arg("gate_up", "E,2F,H", "$weight", "gate rows, then up rows, of each expert"),
                _arg("down", "E,H,F", "$weight", "output projection of each expert"),
                _arg("weights", "T,k", "float32", "weight of each slot"),
                _arg("ids", "T,k", "int32", "expert of each slot; an id >= E stands for the identity"),
                _arg("order", "", "str", "`slot` folds in slot order, in fp32; `rank` leaves the order to the kernel"),
            ),
            (_arg("out", "T,H", "$x", "sum over the slots of weight * expert(x)"),),
            f"{_REFERENCE}.moe:experts",
            weights=("gate_up", "down"),
            facts=("experts", "hidden", "intermediate"),
        ),
        Operator(
            "sampling.block_sumexp",
            "sum(exp(logit / temperature - max)) over fixed blocks of the vocabulary.",
            "block_sumexp(logits, row_max, temperature, block) -> sums",
            (
                _arg("logits", "R,V", "$logits", "logits, widened to fp32"),
                _arg("row_max", "R", "float32", "max of logits / temperature over V"),
                _arg("temperature", "R", "float32", "0 counts as 1"),
                _arg("block", "", "int", "entries in a block (32768); the last block may be short"),
            ),
            (_arg("sums", "R,blocks", "float32", "one sum for each block"),),
            f"{_REFERENCE}.sampling:block_sumexp",
        ),
        Operator(
            "sampling.logprobs",
            "Log-probabilities of given tokens after temperature, over the whole vocabulary.",
            "logprobs(logits, ids, temperature, order, block) -> out",
            (
                _arg("logits", "R,V", "$logits", "logits, widened to fp32, divided by temperature"),
                _arg("ids", "R,M", "int64", "tokens to score; a negative id gives NaN"),
                _arg("temperature", "R", "float32", "0 counts as 1; a division by 1 changes nothing"),
                _arg("order", "", "str", "`torch` or `megatron` (docs/concepts/numerics.md)"),
                _arg("block", "", "int", "block width of `megatron` order"),
            ),
            (_arg("out", "R,M", "float32", "log-probabilities"),),
            f"{_REFERENCE}.sampling:logprobs",
        ),
        Operator(
            "sampling.sample",
            "One token for each row: argmax at temperature 0, else Gumbel-max over the kept set.",
            "sample(logits, temperature, top_k, top_p, min_p, seeds, positions) -> ids",
            (
                _arg("logits", "R,V", "$logits", "logits (penalties and masks already applied)"),
                _arg("temperature", "R", "float32", "0 is greedy, ties to the lowest id"),
                _arg("top_k", "R", "int32", "0 keeps all; ties by ascending id"),
                _arg("top_p", "R", "float32", "1 keeps all"),
                _arg("min_p", "R", "float32", "0 keeps all"),
                _arg("seeds", "R", "int64", "64-bit seed of each row's stream"),
                _arg("positions", "R", "int64", "absolute position of the token to be sampled"),
            ),
            (_arg("ids", "R", "int64", "sampled token ids; -1 where a row holds NaN or nothing finite"),),
            f"{_REFERENCE}.sampling:sample",
        ),
    )
}
