"""Envelopes and trainer profiles, as data: which value each switch must take for a promise to hold.

Promises about runs and batches belong to the envelope; those about a trainer belong to the trainer profile, since
training frameworks differ in their order of operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tokenspeed.numerics.switches import SWITCHES, Promise

LOGPROB_BLOCK = 32768
"""Vocabulary entries in a block of `megatron` order, unless the trainer's own shards are given."""

MEGATRON_VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times the number of shards (`make_vocab_size_divisible_by`)."""


@dataclass(frozen=True)
class Envelope:
    """A named set of promises. `tight` gives the values that its run and batch promises need."""

    name: str
    meaning: str
    promises: tuple[Promise, ...]
    tight: Mapping[str, str]


@dataclass(frozen=True)
class TrainerProfile:
    """The order of operations of one training framework.

    `tight` gives the values of the trainer switches. Under `megatron` logprob order `logprob_block` is the width of a
    vocabulary block and `block_order` the order of additions inside it, which a kernel must declare as a trait. With
    `accepts_vocab_shards` the user may give the trainer's number of vocabulary shards instead; `shard_block_order` is
    then the order inside. `distribution` and `version` are filled by the host.
    """

    name: str
    meaning: str
    tight: Mapping[str, str]
    logprob_block: int = LOGPROB_BLOCK
    block_order: str = "aok_tree"
    accepts_vocab_shards: bool = False
    shard_block_order: str = "torch_sum"
    distribution: str = ""
    version: str = ""


def _table(values: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(values))


ENVELOPES: dict[str, Envelope] = {
    envelope.name: envelope
    for envelope in (
        Envelope("auto", "Every performance choice is open; nothing is promised.", (), _table({})),
        Envelope(
            "rl-bitwise",
            "The same request gives the same bits whatever happens around it, and the trainer's own logprobs.",
            ("run", "batch", "trainer"),
            _table(
                {
                    "autotune": "off",
                    "tf32": "off",
                    "pdl": "off",
                    "collectives": "ordered",
                    "allreduce_fusion": "off",
                    "kernel_features": "batch_invariant",
                    "moe_backend": "aok",
                    "sampling_stream": "per-request",
                    "dsa_slot_order": "sorted",
                }
            ),
        ),
    )
}

DEFAULT_TRAINER = "megatron"

_MEGATRON = {
    "yarn_ramp_mask_device": "cpu",
    "mla_lora_scale": "runtime",
    "layer_boundary_norm": "unfused",
    "router_topk": "torch",
    "logprob_order": "megatron",
    "moe_combine_order": "slot",
}

BUILTIN_TRAINERS = (
    TrainerProfile(
        "megatron",
        "Megatron-LM: vocabulary-parallel cross entropy.",
        _table(_MEGATRON),
        accepts_vocab_shards=True,
    ),
    TrainerProfile(
        "transformers",
        "Hugging Face transformers: log_softmax over the whole row.",
        _table(_MEGATRON | {"logprob_order": "torch"}),
    ),
)


def trainer_faults(profile: object) -> list[str]:
    """What is wrong with a trainer profile as a plugin returned it; empty when it can be used."""
    if not isinstance(profile, TrainerProfile):
        return [f"{profile!r} is not a TrainerProfile"]
    faults = []
    if profile.name in {builtin.name for builtin in BUILTIN_TRAINERS}:
        faults.append("a profile of that name is built in")
    for name, value in profile.tight.items():
        switch = SWITCHES.get(name)
        if switch is None or "trainer" not in switch.promises:
            faults.append(f"{name} is not a trainer switch")
        elif fault := switch.fault(value):
            faults.append(fault)
    missing = {switch.name for switch in SWITCHES.values() if "trainer" in switch.promises} - profile.tight.keys()
    if missing:
        faults.append(f"says nothing about {', '.join(sorted(missing))}")
    return [f"trainer profile {profile.name}: {fault}" for fault in faults]


@dataclass(frozen=True)
class Trainer:
    """A chosen profile with its options: what `--trainer megatron,vocab-shards=8` means."""

    profile: TrainerProfile
    vocab_shards: int | None = None

    @property
    def spelled(self) -> str:
        """As the user writes it."""
        shards = "" if self.vocab_shards is None else f",vocab-shards={self.vocab_shards}"
        return self.profile.name + shards

    @property
    def block_order(self) -> str:
        """The order of additions that a kernel must declare for the inside of a block of `megatron` order."""
        return self.profile.block_order if self.vocab_shards is None else self.profile.shard_block_order

    def logprob_block(self, vocab_size: int) -> int:
        """Vocabulary entries in a block of `megatron` order for a model with `vocab_size` entries."""
        if self.vocab_shards is None:
            return self.profile.logprob_block
        # Megatron pads the vocabulary so that every shard has the same multiple of 128 entries.
        multiple = MEGATRON_VOCAB_MULTIPLE * self.vocab_shards
        return -(-vocab_size // multiple) * MEGATRON_VOCAB_MULTIPLE


@dataclass(frozen=True)
class TrainerRequest:
    """`--trainer` taken apart: a name and its options, not yet matched with an installed profile."""

    name: str
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def parse(cls, text: str) -> TrainerRequest:
        """Take apart `NAME[,KEY=VALUE…]`. Raises ValueError when a part is not `KEY=VALUE`."""
        name, *parts = text.split(",")
        options = {}
        for part in parts:
            key, equals, value = part.partition("=")
            if not (key and equals and value):
                raise ValueError(f"--trainer: {part!r} is not KEY=VALUE (as in megatron,vocab-shards=8)")
            options[key] = value
        return cls(name, MappingProxyType(options))
