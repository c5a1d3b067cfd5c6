"""From logits to log-probabilities and tokens. Legend in the package."""

from __future__ import annotations

from tokenspeed.kernels.operators.description import Argument, Operator, scalar

SAMPLING = (
    Operator(
        "sampling.block_sumexp",
        "sum(exp(logit / temperature - max)) over fixed blocks of the vocabulary.",
        (
            Argument("logits", "R,V", "$logits", "logits, widened to fp32"),
            Argument("row_max", "R", "float32", "max of logits / temperature over V"),
            Argument("temperature", "R", "float32", "0 counts as 1"),
            scalar("block", "int", "entries in a block (32768); the last block may be short"),
        ),
        (Argument("sums", "R,blocks", "float32", "one sum for each block"),),
        "tokenspeed.kernels.reference.sampling:block_sumexp",
    ),
    Operator(
        "sampling.logprobs",
        "Log-probabilities of given tokens after temperature, over the whole vocabulary.",
        (
            Argument("logits", "R,V", "$logits", "logits, widened to fp32, divided by temperature"),
            Argument("ids", "R,M", "int64", "tokens to score; a negative id gives NaN"),
            Argument("temperature", "R", "float32", "0 counts as 1; a division by 1 changes nothing"),
            scalar("order", "str", "`torch` or `megatron` (docs/concepts/numerics.md)"),
            scalar("block", "int", "block width of `megatron` order"),
        ),
        (Argument("out", "R,M", "float32", "log-probabilities"),),
        "tokenspeed.kernels.reference.sampling:logprobs",
    ),
    Operator(
        "sampling.sample",
        "One token for each row: argmax at temperature 0, else Gumbel-max over the kept set.",
        (
            Argument("logits", "R,V", "$logits", "logits (penalties and masks already applied)"),
            Argument("temperature", "R", "float32", "0 is greedy, ties to the lowest id"),
            Argument("top_k", "R", "int32", "0 keeps all; ties by ascending id"),
            Argument("top_p", "R", "float32", "1 keeps all"),
            Argument("min_p", "R", "float32", "0 keeps all"),
            Argument("seeds", "R", "int64", "64-bit seed of each row's stream"),
            Argument("positions", "R", "int64", "absolute position of the token to be sampled"),
        ),
        (Argument("ids", "R", "int64", "sampled token ids; -1 where a row holds NaN or nothing finite"),),
        "tokenspeed.kernels.reference.sampling:sample",
    ),
)
