"""From what the user asked to one frozen value: each switch with its reason, required features and traits.

Pure: the same arguments give the same answer, and every problem is collected. An envelope only tightens; a value that
the user gave and that the envelope would have to change is a conflict, never overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenspeed.errors import Problem
from tokenspeed.kernels.spec import BATCH_INVARIANT, KernelSpec, TraitValue
from tokenspeed.numerics.envelopes import (
    BUILTIN_TRAINERS,
    DEFAULT_TRAINER,
    ENVELOPES,
    LOGPROB_BLOCK,
    Envelope,
    Trainer,
    TrainerProfile,
    TrainerRequest,
)
from tokenspeed.numerics.switches import PROMISES, SWITCHES, Switch


@dataclass(frozen=True)
class ResolvedNumerics:
    """The numerics of one engine, frozen at start and carried to whoever needs it.

    `switches` has a value for every switch and `reasons` says why it has it. `features` are required of every kernel;
    `traits` are trait values required by operator. `trainer` is None where no trainer alignment is promised.
    """

    envelope: str
    trainer: str | None
    switches: Mapping[str, str]
    reasons: Mapping[str, str]
    features: frozenset[str]
    traits: Mapping[str, Mapping[str, TraitValue]]
    trainer_choice: Trainer | None = None

    @property
    def promises(self) -> tuple[str, ...]:
        """`run`, `batch`, `trainer`, as far as the envelope makes them."""
        return ENVELOPES[self.envelope].promises

    def logprob_block(self, vocab_size: int) -> int:
        """Vocabulary entries in a block of `megatron` logprob order."""
        return LOGPROB_BLOCK if self.trainer_choice is None else self.trainer_choice.logprob_block(vocab_size)

    def as_dict(self) -> dict[str, Any]:
        """Plain data with sorted keys, for JSON."""
        return {
            "envelope": self.envelope,
            "trainer": self.trainer,
            "promises": list(self.promises),
            "switches": dict(sorted(self.switches.items())),
            "reasons": dict(sorted(self.reasons.items())),
            "features": sorted(self.features),
            "traits": {operator: dict(sorted(traits.items())) for operator, traits in sorted(self.traits.items())},
        }


@dataclass(frozen=True)
class Resolution:
    """The resolved numerics and every problem found. With problems the value only serves to look for further ones."""

    numerics: ResolvedNumerics
    problems: tuple[Problem, ...]


def resolve(
    envelope: str = "auto",
    trainer: str | None = None,
    given: Mapping[str, str] | None = None,
    *,
    sources: Mapping[str, str] | None = None,
    profiles: Iterable[TrainerProfile] = BUILTIN_TRAINERS,
    kernels: Iterable[KernelSpec] = (),
    device: str = "cpu",
) -> Resolution:
    """Resolve every switch.

    `given` maps the switches that the user set himself to their values, `sources` says where each was set (for
    messages), `profiles` are the installed trainer profiles and `kernels` the installed kernels.
    """
    given, sources = given or {}, sources or {}
    problems = [Problem("unknown-value", fault) for fault in _faults(envelope, given)]
    chosen = ENVELOPES.get(envelope, ENVELOPES["auto"])
    given = {name: value for name, value in given.items() if name in SWITCHES and not SWITCHES[name].fault(value)}
    trainer_choice = _choose_trainer(chosen, trainer, {profile.name: profile for profile in profiles}, problems)
    tight = {**chosen.tight, **(trainer_choice.profile.tight if trainer_choice else {})}
    tight = _accept_backend(tight, given, tuple(kernels))
    problems += [
        _conflict(chosen, SWITCHES[name], given[name], tight[name], sources.get(name, ""))
        for name in SWITCHES
        if name in given and name in tight and given[name] != tight[name]
    ]
    values, reasons = {}, {}
    for switch in SWITCHES.values():
        values[switch.name], reasons[switch.name] = _value(chosen, trainer_choice, switch, given, tight, sources)
        if switch.gpu_only and device != "cuda":
            reasons[switch.name] += "; no effect on a CPU"
    numerics = ResolvedNumerics(
        chosen.name,
        trainer_choice.spelled if trainer_choice else None,
        MappingProxyType(values),
        MappingProxyType(reasons),
        _features(values),
        _traits(values, trainer_choice),
        trainer_choice,
    )
    return Resolution(numerics, tuple(problems))


def _faults(envelope: str, given: Mapping[str, str]) -> Iterable[str]:
    if envelope not in ENVELOPES:
        yield f"--numerics: {envelope!r} is not one of {', '.join(ENVELOPES)}"
    for name, value in given.items():
        if name not in SWITCHES:
            yield f"{name!r} is not a switch; the switches are {', '.join(SWITCHES)}"
        elif fault := SWITCHES[name].fault(value):
            yield fault


def _choose_trainer(
    envelope: Envelope, text: str | None, profiles: Mapping[str, TrainerProfile], problems: list[Problem]
) -> Trainer | None:
    if "trainer" not in envelope.promises:
        if text is not None:
            problems.append(
                Problem(
                    "conflict",
                    f"--trainer {text} was given, but --numerics {envelope.name} promises no trainer alignment",
                    remedy="add --numerics rl-bitwise, or drop --trainer and set single switches",
                )
            )
        return None
    try:
        request = TrainerRequest.parse(text or DEFAULT_TRAINER)
    except ValueError as error:
        problems.append(Problem("unknown-value", str(error)))
        return Trainer(profiles[DEFAULT_TRAINER])
    profile = profiles.get(request.name)
    if profile is None:
        problems.append(
            Problem(
                "unknown-value",
                f"--trainer: {request.name!r} is not one of {', '.join(sorted(profiles))}",
                remedy="install a plugin that registers this trainer profile (hook tokenspeed_trainer_profiles)",
            )
        )
        return Trainer(profiles[DEFAULT_TRAINER])
    return Trainer(profile, _vocab_shards(request, profile, problems))


def _vocab_shards(request: TrainerRequest, profile: TrainerProfile, problems: list[Problem]) -> int | None:
    allowed = ("vocab-shards",) if profile.accepts_vocab_shards else ()
    for key in request.options.keys() - set(allowed):
        options = ", ".join(allowed) or "none"
        problems.append(
            Problem("unknown-value", f"--trainer: {key!r} is not an option of {profile.name}; its options: {options}")
        )
    text = request.options.get("vocab-shards")
    if text is None or not profile.accepts_vocab_shards:
        return None
    if not text.isdecimal() or int(text) < 1:
        problems.append(Problem("unknown-value", f"--trainer: vocab-shards={text!r} is not a positive integer"))
        return None
    return int(text)


def _accept_backend(
    tight: Mapping[str, str], given: Mapping[str, str], kernels: tuple[KernelSpec, ...]
) -> dict[str, str]:
    """The promise is carried by features, not by a name: another solution that declares both may take the place."""
    accepted = dict(tight)
    backend = given.get("moe_backend")
    if "moe_backend" in tight and backend is not None and any(_keeps_promise(spec, backend) for spec in kernels):
        accepted["moe_backend"] = backend
    return accepted


def _keeps_promise(spec: KernelSpec, solution: str) -> bool:
    return (
        spec.operator == "moe.experts"
        and spec.solution == solution
        and BATCH_INVARIANT in spec.features
        and "slot" in spec.traits.get("combine_order", ())
    )


def _conflict(envelope: Envelope, switch: Switch, value: str, tight: str, source: str) -> Problem:
    where = f" ({source})" if source and not source.startswith("--") else ""
    broken = [f"it would break the promise: {PROMISES[promise]}" for promise in switch.promises]
    if switch.any_name:
        broken.append(f"no installed kernel of {value} declares {BATCH_INVARIANT} and combine_order=slot")
    return Problem(
        "conflict",
        f"{switch.spelled(value)} was given{where}, but --numerics {envelope.name} needs {switch.spelled(tight)}",
        (*broken, f"it changes: {switch.changes}"),
        f"drop it or write {switch.spelled(tight)}; or use --numerics auto, which makes no promise",
    )


def _value(
    envelope: Envelope,
    trainer: Trainer | None,
    switch: Switch,
    given: Mapping[str, str],
    tight: Mapping[str, str],
    sources: Mapping[str, str],
) -> tuple[str, str]:
    by_user = f"given ({sources[switch.name]})" if switch.name in sources else "given"
    if switch.name in tight:
        owner = f"trainer {trainer.profile.name}" if trainer and switch.name in trainer.profile.tight else envelope.name
        also = f", also {by_user}" if given.get(switch.name) == tight[switch.name] else ""
        return tight[switch.name], f"required by {owner}{also}"
    if switch.name in given:
        return given[switch.name], by_user
    return switch.default, "default"


def _features(values: Mapping[str, str]) -> frozenset[str]:
    feature = values["kernel_features"]
    return frozenset() if feature == "none" else frozenset({feature})


def _traits(values: Mapping[str, str], trainer: Trainer | None) -> Mapping[str, Mapping[str, TraitValue]]:
    traits: dict[str, Mapping[str, TraitValue]] = {}
    if values["moe_combine_order"] == "slot":
        traits["moe.experts"] = MappingProxyType({"combine_order": "slot"})
    if values["sampling_stream"] == "per-request":
        traits["sampling.sample"] = MappingProxyType({"stream": "per-request"})
    if values["dsa_slot_order"] == "sorted":
        traits["attention.sparse_paged"] = MappingProxyType({"slot_order": "sorted"})
    if trainer and values["logprob_order"] == "megatron":
        # A claim of alignment must name the order inside a block too: the kit's, or the trainer's own torch.sum.
        order = MappingProxyType({"block_order": trainer.block_order})
        traits["sampling.logprobs"] = traits["sampling.block_sumexp"] = order
    return MappingProxyType(traits)
