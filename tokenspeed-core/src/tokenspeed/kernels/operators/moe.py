"""Mixtures of experts: the choice of experts, and their sum. Legend in the package."""

from __future__ import annotations

from tokenspeed.kernels.operators.description import Argument, Operator, scalar

MIXTURE_OF_EXPERTS = (
    Operator(
        "moe.route",
        "The k experts of each token and their weights, all in fp32.",
        (
            Argument("logits", "T,E", "$logits", "router logits, widened to fp32"),
            Argument("bias", "E", "float32", "added to the scores for the choice only", optional=True),
            scalar("top_k", "int", "experts for each token"),
            scalar("scoring", "str", "`softmax` over E, or `sigmoid` of each logit"),
            scalar("form", "str", "`torch` or `fused`: reference.moe says what each computes"),
            scalar("normalise", "bool", "divide the chosen scores by their sum + 1e-20", default="True"),
            scalar("scale", "float", "multiplies the weights at the end", default="1.0"),
            scalar("groups", "int", "equal groups of neighbouring experts", default="1"),
            scalar(
                "top_groups",
                "int",
                "only experts of so many groups are eligible: those whose two best add up to most",
                default="1",
            ),
        ),
        (
            Argument("weights", "T,k", "float32", "scores (without bias) of the chosen, best choice first"),
            Argument("ids", "T,k", "int32", "chosen experts, equal scores by ascending expert"),
        ),
        "tokenspeed.kernels.reference.moe:route",
        facts=("experts", "top_k"),
    ),
    Operator(
        "moe.experts",
        "Weighted sum of the chosen experts' gated MLPs; reads the weights of chosen experts only.",
        (
            Argument("x", "T,H", "$x", "activations"),
            Argument("gate_up", "E,2F,H", "$weight", "gate rows, then up rows, of each expert"),
            Argument("down", "E,H,F", "$weight", "output projection of each expert"),
            Argument("weights", "T,k", "float32", "weight of each slot"),
            Argument("ids", "T,k", "int32", "expert of each slot; an id >= E stands for the identity"),
            scalar("order", "str", "`slot` folds in slot order, in fp32; `rank` leaves the order to the kernel"),
        ),
        (Argument("out", "T,H", "$x", "sum over the slots of weight * expert(x)"),),
        "tokenspeed.kernels.reference.moe:experts",
        weights=("gate_up", "down"),
        facts=("experts", "hidden", "intermediate"),
    ),
)
