"""Operators on rows of activations: embedding, projections, norms, rotation, activation. Legend in the package."""

from __future__ import annotations

from tokenspeed.kernels.operators.description import Argument, Operator, scalar

DENSE = (
    Operator(
        "embedding.lookup",
        "Rows of the embedding table.",
        (Argument("ids", "T", "int64", "token ids"), Argument("weight", "V,H", "$weight", "embedding table")),
        (Argument("out", "T,H", "$weight", "embeddings"),),
        "tokenspeed.kernels.reference.embedding:lookup",
        weights=("weight",),
    ),
    Operator(
        "gemm.linear",
        "x times the transpose of weight, plus bias; fp32 accumulation, one rounding to the output dtype.",
        (
            Argument("x", "T,K", "$x", "activations"),
            Argument("weight", "N,K", "$weight", "weights, one row for each output"),
            Argument("bias", "N", "$weight", "bias", optional=True, default="None"),
        ),
        (Argument("out", "T,N", "$x", "projection"),),
        "tokenspeed.kernels.reference.gemm:linear",
        weights=("weight",),
        facts=("k", "n"),
    ),
    Operator(
        "gemm.batched",
        "For each of G groups, its columns of x times the transpose of its weight; like gemm.linear in arithmetic.",
        (
            Argument("x", "T,G,K", "$x", "activations; token and group strides are free"),
            Argument("weight", "G,N,K", "$weight", "one weight for each group"),
        ),
        (Argument("out", "T,G,N", "$x", "projections, contiguous"),),
        "tokenspeed.kernels.reference.gemm:batched",
        weights=("weight",),
        facts=("groups", "k", "n"),
    ),
    Operator(
        "norm.rms",
        "Root-mean-square norm over the last axis, statistics in fp32.",
        (
            Argument("x", "T,H or T,heads,D", "$x", "activations; row and head strides are free"),
            Argument("weight", "H or D", "$weight", "scale; applied after x/rms was rounded to x's dtype"),
            scalar("eps", "float", "added to the mean square"),
        ),
        (Argument("out", "as x", "$x", "normalised, contiguous"),),
        "tokenspeed.kernels.reference.norm:rms",
        facts=("hidden",),
    ),
    Operator(
        "norm.add_rms",
        "x + residual, and the norm of the unrounded fp32 sum; for `auto` only.",
        (
            Argument("x", "T,H", "$x", "activations"),
            Argument("residual", "T,H", "$x", "residual stream"),
            Argument("weight", "H", "$weight", "scale"),
            scalar("eps", "float", "added to the mean square"),
        ),
        (Argument("out", "T,H", "$x", "norm of the sum"), Argument("sum", "T,H", "$x", "the sum, rounded once")),
        "tokenspeed.kernels.reference.norm:add_rms",
        facts=("hidden",),
    ),
    Operator(
        "norm.layer",
        "(x - mean) / standard deviation, times weight, plus bias; in fp32 with one rounding.",
        (
            Argument("x", "T,H", "$x", "activations"),
            Argument("weight", "H", "$weight", "scale"),
            Argument("bias", "H", "$weight", "what is added last"),
            scalar("eps", "float", "added to the variance"),
        ),
        (Argument("out", "T,H", "$x", "normalised, contiguous"),),
        "tokenspeed.kernels.reference.norm:layer",
        facts=("hidden",),
    ),
    Operator(
        "rope.apply",
        "Rotary position embedding of queries and keys, computed in fp32 with one rounding.",
        (
            Argument("q", "T,Hq,D", "$x", "queries"),
            Argument("k", "T,Hkv,D", "$x", "keys"),
            Argument("positions", "T", "int64", "absolute positions"),
            Argument(
                "cos_sin", "positions,R", "float32", "R/2 cosines then R/2 sines for each position; R <= D rotated"
            ),
            scalar("interleaved", "bool", "pairs (2i, 2i+1) instead of (i, i + R/2)", default="False"),
        ),
        (Argument("q_out", "T,Hq,D", "$x", "rotated queries"), Argument("k_out", "T,Hkv,D", "$x", "rotated keys")),
        "tokenspeed.kernels.reference.rope:apply",
        facts=("head_dim", "rotary_dim"),
    ),
    Operator(
        "activation.silu_and_mul",
        "silu(gate) * up in fp32 with one rounding.",
        (Argument("gate_up", "T,2F", "$x", "gate in the first half of a row, up in the second"),),
        (Argument("out", "T,F", "$x", "activation"),),
        "tokenspeed.kernels.reference.activation:silu_and_mul",
    ),
)
