"""The switches: every choice that can change a result's bits, as data. Knows nothing of envelopes, models or kernels.

A switch's value is resolved once at start and travels as an argument to the code that it governs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Promise = Literal["run", "batch", "trainer"]

PROMISES: dict[Promise, str] = {
    "run": "the same request gives the same bits on every run",
    "batch": "a request's bits do not depend on what shares the batch, the chunks or the cache",
    "trainer": "the forward follows the training framework's order of operations",
}


@dataclass(frozen=True)
class Switch:
    """One choice. `values` lists what is allowed, the default under `auto` first.

    With `any_name` other values are allowed too (the name of a solution). `promises` are those that a looser value
    breaks; `changes` says what the switch alters. A `gpu_only` switch has no effect on a CPU.
    """

    name: str
    values: tuple[str, ...]
    promises: tuple[Promise, ...]
    changes: str
    meaning: str
    gpu_only: bool = False
    any_name: bool = False

    @property
    def flag(self) -> str:
        """`--layer-boundary-norm`."""
        return "--" + self.name.replace("_", "-")

    @property
    def default(self) -> str:
        """The value under `auto`."""
        return self.values[0]

    @property
    def is_boolean(self) -> bool:
        """Whether the switch is written `--name` / `--no-name`."""
        return set(self.values) == {"on", "off"}

    def spelled(self, value: str) -> str:
        """The flag as a user writes it: `--no-tf32`, `--router-topk torch`."""
        if self.is_boolean:
            return self.flag if value == "on" else "--no-" + self.flag[2:]
        return f"{self.flag} {value}"

    def fault(self, value: object) -> str | None:
        """Why `value` is not allowed, naming the flag, the allowed list and the value; None when it is."""
        if value in self.values or (self.any_name and isinstance(value, str) and value.isidentifier()):
            return None
        allowed = ", ".join(self.values) + (", or the name of a solution" if self.any_name else "")
        return f"{self.flag}: {value!r} is not one of {allowed}"


_ON_OFF = ("on", "off")

SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        Switch(
            "autotune",
            _ON_OFF,
            ("run",),
            "kernel tactic",
            "Time kernel variants at start and keep the fastest.",
        ),
        Switch(
            "tf32",
            _ON_OFF,
            ("run",),
            "forward values",
            "Let fp32 matrix products use TF32 tensor cores.",
            gpu_only=True,
        ),
        Switch(
            "pdl",
            _ON_OFF,
            ("run",),
            "kernel chain overlap",
            "Let a kernel start before the one in front of it has ended (programmatic dependent launch).",
            gpu_only=True,
        ),
        Switch(
            "collectives",
            ("fast", "ordered"),
            ("run", "batch"),
            "association order of cross-rank sums; NCCL_ALGO=Ring and NCCL_PROTO=Simple where NCCL moves data",
            "How partial results of several ranks are added.",
        ),
        Switch(
            "allreduce_fusion",
            _ON_OFF,
            ("run", "batch"),
            "fused all-reduce and norm",
            "Fuse the all-reduce with the norm that follows it.",
        ),
        Switch(
            "kernel_features",
            ("none", "batch_invariant"),
            ("batch",),
            "every operator's selection requires the feature",
            "The feature that every kernel must declare.",
        ),
        Switch(
            "moe_backend",
            ("auto", "aok"),
            ("batch",),
            "routed experts",
            "The solution whose kernels compute routed experts.",
            any_name=True,
        ),
        Switch(
            "sampling_stream",
            ("batch", "per-request"),
            ("run", "batch"),
            "tokens at temperature above 0",
            "Whether random numbers come from one stream for the batch or are a function of the request.",
        ),
        Switch(
            "dsa_slot_order",
            ("selection", "sorted"),
            ("batch",),
            "order in which selected KV rows are reduced: `sorted` is ascending position, never physical slot",
            "Order of the selected rows in sparse attention.",
        ),
        Switch(
            "yarn_ramp_mask_device",
            ("model", "cpu"),
            ("trainer",),
            "RoPE inverse frequencies are built on the host",
            "Where RoPE inverse frequencies are computed.",
        ),
        Switch(
            "mla_lora_scale",
            ("folded", "runtime"),
            ("trainer",),
            "sqrt(hidden/lora_rank) is multiplied at run time in bf16, not folded into the norm weight",
            "Where multi-head latent attention applies its LoRA scale.",
        ),
        Switch(
            "layer_boundary_norm",
            ("fused", "unfused"),
            ("trainer",),
            "bf16 `hidden + residual` is materialised, then a standalone RMSNorm",
            "Whether the residual sum and the norm after it are one operation.",
        ),
        Switch(
            "router_topk",
            ("fused", "torch"),
            ("trainer",),
            "fp32 softmax, tie order of `torch.topk`",
            "How a mixture-of-experts router selects experts.",
        ),
        Switch(
            "logprob_order",
            ("torch", "megatron"),
            ("trainer",),
            "reported logprobs only",
            "Order of additions in the log-softmax behind reported logprobs.",
        ),
        Switch(
            "moe_combine_order",
            ("rank", "slot"),
            ("trainer",),
            "a token's top-k expert outputs are summed in fp32 in slot order",
            "Order in which a token's expert outputs are summed.",
        ),
    )
}
