"""What a model package states about an architecture, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class ModelProfile:
    """One architecture that a distribution supports.

    `architecture` is the name in a checkpoint's `config.json` (`Qwen3ForCausalLM`). `model` is `"module:Class"`, a
    `tokenspeed.models.base.CausalLM`. `numerics_envelopes` lists the envelopes for which the full verification harness
    passes; an envelope that is not listed is refused at start. `needs_switches` names the trainer-order switches that
    change something for this architecture. `bit_order` names the published order of the forward's operations with its
    version (`tokenspeed-models/qwen3@1`): raise the version whenever the bits of a forward change; without it, the
    distribution's version identifies them. `embedded` maps a short model name to a directory inside the package
    (`"package:relative/path"`), for models that a distribution carries. `distribution` and `version` are filled by the
    host.
    """

    architecture: str
    model: str
    numerics_envelopes: frozenset[str] = frozenset({"auto"})
    needs_switches: frozenset[str] = frozenset()
    embedded: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    bit_order: str | None = None
    distribution: str = ""
    version: str = ""
