"""The KV cache and what reads it: paged, latent and sparse attention. Legend in the package."""

from __future__ import annotations

from tokenspeed.kernels.operators.description import Argument, Operator, scalar

_KV = (
    Argument("k_cache", "P,S,Hkv,D", "$kv", "keys of one layer; the inside of a page is the kernel's own `kv_layout`"),
    Argument("v_cache", "P,S,Hkv,D", "$kv", "values of one layer, likewise"),
)
_LATENT = Argument("cache", "P,S,1,C", "$kv", "compressed entries of one layer, in this order on every kernel")
_SLOTS = Argument("slots", "T", "int64", "where each token goes; a negative slot is skipped")
_SEQUENCES = (
    Argument("query_starts", "B+1", "int32", "first row of each sequence in q, then T"),
    Argument("context_lens", "B", "int32", "tokens of each sequence in the cache, this call's queries included"),
    Argument("page_tables", "B,W", "int32", "page of each 16 positions; entries past the context are unspecified"),
    scalar("scale", "float", "multiplies q.k"),
)
_ABSORBED = Argument("q", "T,Hq,C", "$x", "queries: the absorbed part, then the rotated one; places as attention.paged")
_LATENT_DIM = scalar("latent_dim", "int", "R, the first values of an entry that are summed")

ATTENTION = (
    Operator(
        "cache.write",
        "Store keys and values in their slots.",
        (
            Argument("k", "T,Hkv,D", "$x", "keys, rotated"),
            Argument("v", "T,Hkv,D", "$x", "values"),
            *_KV,
            _SLOTS,
        ),
        (),
        "tokenspeed.kernels.reference.cache:write",
        links=("kv_layout",),
        facts=("head_dim",),
    ),
    Operator(
        "attention.paged",
        "Causal attention of ragged queries over the paged cache; prefill chunks and decode rows in one call.",
        (
            Argument(
                "q", "T,Hq,D", "$x", "queries, rotated; query i of sequence b stands at context_lens[b] - n_b + i"
            ),
            *_KV,
            *_SEQUENCES,
            scalar("window", "int", "keys seen by a query, itself included; 0 sees all", default="0"),
        ),
        (Argument("out", "T,Hq,D", "$x", "attention output, contiguous"),),
        "tokenspeed.kernels.reference.attention:paged",
        links=("kv_layout",),
        facts=("head_dim", "group_size"),
    ),
    Operator(
        "cache.write_latent",
        "Store compressed entries (latent, then rotated key) in their slots.",
        (Argument("latent", "T,C", "$x", "one entry for each token"), _LATENT, _SLOTS),
        (),
        "tokenspeed.kernels.reference.mla:write_latent",
        facts=("width",),
    ),
    Operator(
        "attention.mla_paged",
        "Causal attention over compressed entries that all heads share: an entry is the key, its latent part the "
        "value.",
        (_ABSORBED, _LATENT, *_SEQUENCES, _LATENT_DIM),
        (Argument("out", "T,Hq,R", "$x", "attention output in the latent space, contiguous"),),
        "tokenspeed.kernels.reference.mla:attention",
        facts=("heads", "latent_dim", "width"),
    ),
    Operator(
        "attention.index_scores",
        "Scores of the lightning indexer: sum over its heads of weight * relu(q.k * scale), in fp32.",
        (
            Argument("q", "T,Hi,C", "$x", "queries of the indexer, rotated; places as attention.paged"),
            Argument("weights", "T,Hi", "float32", "weight of each head of each query, of any sign"),
            _LATENT,
            *_SEQUENCES,
        ),
        (Argument("scores", "T,L", "float32", "score of each position, -infinity where the query does not see it"),),
        "tokenspeed.kernels.reference.sparse:index_scores",
        facts=("index_heads", "width"),
    ),
    Operator(
        "attention.index_topk",
        "The k positions of largest score that each query sees; a row's choice depends on that row alone.",
        (
            Argument("scores", "T,L", "float32", "score of each position; what lies past a row's position is ignored"),
            Argument("positions", "T", "int64", "where each query stands; it sees positions 0 to its own"),
            scalar("top_k", "int", "k, positions to choose"),
        ),
        (
            Argument(
                "indices",
                "T,k",
                "int32",
                "chosen positions, best first: NaN, then falling scores, equal ones (-0 and +0 too) by ascending "
                "position; -1 where there are fewer",
            ),
        ),
        "tokenspeed.kernels.reference.sparse:index_topk",
        facts=("top_k",),
    ),
    Operator(
        "attention.sparse_paged",
        "attention.mla_paged of each query over the positions that were selected for it, and no others.",
        (
            _ABSORBED,
            _LATENT,
            Argument("indices", "T,k", "int32", "positions of each query's sequence, distinct; -1 fills up at the end"),
            *_SEQUENCES,
            _LATENT_DIM,
            scalar(
                "order",
                "str",
                "`sorted` reduces in ascending position, whatever the pages; `selection` as the indices come",
            ),
        ),
        (Argument("out", "T,Hq,R", "$x", "attention output in the latent space, contiguous; 0 without positions"),),
        "tokenspeed.kernels.reference.sparse:attention",
        facts=("heads", "latent_dim", "width"),
    ),
)
