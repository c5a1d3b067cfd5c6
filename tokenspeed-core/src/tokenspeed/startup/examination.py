"""Everything that is decided before anything is loaded, and every problem with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenspeed import __version__
from tokenspeed.config import EngineConfig
from tokenspeed.config_sources import VARIABLES_FOR_TESTS, variables_for_tests
from tokenspeed.engine.buckets import Recording, plan_recording
from tokenspeed.errors import CheckpointError, PluginError, Problem, StartRefused
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import Pins, Selection, select
from tokenspeed.machine import Machine, gpu_used_with, read_machine
from tokenspeed.models.profile import ModelProfile
from tokenspeed.models.registry import ModelRegistry
from tokenspeed.numerics.plan import Plan, make_plan
from tokenspeed.numerics.resolve import ResolvedNumerics, resolve
from tokenspeed.numerics.settings import GpuSettings, gpu_settings
from tokenspeed.plugins import PluginHost, load_plugins
from tokenspeed.sizing import Footprint, Sizes, choose_sizes, seats_and_budget
from tokenspeed.startup.meta_model import Built, build_on_meta, store_as_kernels_read, weight_format

if TYPE_CHECKING:
    from tokenspeed.loading.checkpoint import Checkpoint


@dataclass(frozen=True)
class Examination:
    """What a start would do. Fields are None from the first step on that had nothing to go on; `problems` say why."""

    config: EngineConfig
    machine: Machine
    host: PluginHost
    registry: KernelRegistry
    numerics: ResolvedNumerics
    problems: tuple[Problem, ...]
    settings: GpuSettings
    checkpoint: Checkpoint | None = None
    profile: ModelProfile | None = None
    built: Built | None = None
    selection: Selection | None = None
    sizes: Sizes | None = None
    recording: Recording | None = None


@dataclass(frozen=True)
class Prepared:
    """A start without problems: everything is decided, nothing is loaded."""

    config: EngineConfig
    machine: Machine
    host: PluginHost
    checkpoint: Checkpoint
    built: Built
    sizes: Sizes
    recording: Recording
    settings: GpuSettings
    plan: Plan


def prepare(config: EngineConfig, machine: Machine | None = None) -> Prepared:
    """Decide everything and load nothing. Raises StartRefused with every problem, ConfigError for a wrong option."""
    found = examine(config, machine)
    if found.problems:
        raise StartRefused(found.problems)
    assert found.checkpoint
    assert found.profile
    assert found.built
    assert found.selection
    assert found.sizes
    assert found.recording
    plan = make_plan(
        model=config.model,
        dtype=found.built.dtype_name,
        profile=found.profile,
        machine=found.machine,
        numerics=found.numerics,
        selection=found.selection,
        core_version=__version__,
        notes=_notes(found, found.built, found.sizes),
    )
    return Prepared(
        config=found.config,
        machine=found.machine,
        host=found.host,
        checkpoint=found.checkpoint,
        built=found.built,
        sizes=found.sizes,
        recording=found.recording,
        settings=found.settings,
        plan=plan,
    )


def examine(config: EngineConfig, machine: Machine | None = None, *, weights: bool = True) -> Examination:
    """Go through every step that decides, and collect every problem.

    `machine` is made up, or read when None. Without `weights` the checkpoint's tensors are not looked at, so that
    `config.json` alone is enough.
    """
    problems: list[Problem] = []
    used_with = gpu_used_with()  # reading the machine uses it
    machine = machine or read_machine(config.device)
    host = load_plugins(config.plugins)
    problems += host.problems
    registry = KernelRegistry.from_plugins(host)
    numerics = _resolve(config, machine, host, registry, problems)
    settings, unkept = gpu_settings(numerics, machine.device, os.environ, used_with)
    problems += unkept
    found = Examination(config, machine, host, registry, numerics, (), settings)
    models = ModelRegistry.from_plugins(host)
    checkpoint, profile = _find_model(config, models, problems)
    found = replace(found, checkpoint=checkpoint, profile=profile)
    if checkpoint is not None and profile is not None:
        problems += _gate(config, profile, numerics)
        built = None
        with _collecting(problems):
            built = build_on_meta(config, checkpoint, profile, numerics)
        if built is not None:
            selection = select(built.context.needs(), registry, machine, _pins(config, numerics))
            problems += selection.problems
            problems += _check_parallel_layout(config, built, numerics)
            sizes = _choose_sizes(config, machine, built, problems)
            recording = _plan_recording(config, machine, selection, sizes)
            store_as_kernels_read(built.model, selection.choices)
            built.model.limit_context(sizes.max_model_len)
            if weights and not (weight_format(checkpoint) and selection.problems):
                _check_weights(checkpoint, built, problems)
            found = replace(found, built=built, selection=selection, sizes=sizes, recording=recording)
    return replace(found, problems=tuple(problems))


def _resolve(
    config: EngineConfig, machine: Machine, host: PluginHost, registry: KernelRegistry, problems: list[Problem]
) -> ResolvedNumerics:
    resolution = resolve(
        config.numerics,
        config.trainer,
        config.switches,
        sources=config.given,
        profiles=host.trainer_profiles(),
        kernels=registry,
        device=machine.device,
    )
    problems += resolution.problems
    return resolution.numerics


def _find_model(
    config: EngineConfig, models: ModelRegistry, problems: list[Problem]
) -> tuple[Checkpoint | None, ModelProfile | None]:
    """The checkpoint's directory and what its package states; None with a problem where there is none."""
    from tokenspeed.loading.checkpoint import Checkpoint
    from tokenspeed.loading.locate import locate_model

    with _collecting(problems):
        checkpoint = Checkpoint(locate_model(config.model, models.embedded))
        profile = models.find(checkpoint.architecture)
        if isinstance(profile, ModelProfile):
            return checkpoint, profile
        problems.append(profile)
        return checkpoint, None
    return None, None


def _gate(config: EngineConfig, profile: ModelProfile, numerics: ResolvedNumerics) -> Iterator[Problem]:
    """A profile lists the envelopes whose whole verification passes for it; another one is refused."""
    if numerics.envelope not in profile.numerics_envelopes:
        listed = ", ".join(sorted(profile.numerics_envelopes)) or "none"
        yield Problem(
            "profile",
            f"--numerics {numerics.envelope} was given, and the profile of {profile.architecture} "
            f"({profile.distribution} {profile.version}) lists {listed}",
            (
                f"model {config.model}",
                f"an author adds {numerics.envelope} to numerics_envelopes, runs `tokenspeed numerics verify --full`, "
                "and publishes the profile with it when that passes",
            ),
            "use an envelope that is listed, or ask the model's author to verify it",
        )


def _check_parallel_layout(config: EngineConfig, built: Built, numerics: ResolvedNumerics) -> Iterator[Problem]:
    """Every layer is computed in one process; a layout that would break a promise is refused for that reason."""
    if config.tensor_parallel_size == 1:
        return
    given, remedy = f"--tensor-parallel-size {config.tensor_parallel_size} was given", "use --tensor-parallel-size 1"
    has_experts = any(need.operator == "moe.experts" for need in built.context.needs())
    if has_experts and numerics.switches["moe_combine_order"] == "slot":
        yield Problem(
            "parallel",
            f"{given}, and a mixture of experts is computed under --moe-combine-order slot",
            (
                "an expert whose inner size is split over ranks gives partial sums; adding them up is a second fold, "
                "beside the one in slot order",
            ),
            remedy,
        )
    else:
        yield Problem(
            "parallel", f"{given}; every layer is computed in one process", (), "use --tensor-parallel-size 1"
        )


def _pins(config: EngineConfig, numerics: ResolvedNumerics) -> Pins:
    backend = numerics.switches["moe_backend"]
    return Pins(config.kernel, {} if backend == "auto" else {"moe.experts": backend})


def _choose_sizes(config: EngineConfig, machine: Machine, built: Built, problems: list[Problem]) -> Sizes:
    from tokenspeed.engine.kv_cache import bytes_per_page

    rows, tokens = seats_and_budget(config)
    footprint = Footprint.of(
        sum(weight.numel() * weight.element_size() for weight in built.model.parameters()),
        built.context.needs(),
        tokens=tokens,
        rows=rows,
        vocabulary=built.model.vocab_size,
    )
    sizes, found = choose_sizes(
        config,
        machine,
        max_positions=built.model.max_positions,
        bytes_per_page=bytes_per_page(built.model.kv_specs()),
        footprint=footprint,
    )
    problems += found
    return sizes


def _plan_recording(config: EngineConfig, machine: Machine, selection: Selection, sizes: Sizes) -> Recording:
    return plan_recording(
        machine.device,
        selection.choices.values(),
        wanted=config.decode_graphs,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
    )


def _check_weights(checkpoint: Checkpoint, built: Built, problems: list[Problem]) -> None:
    """Compare the headers of the weight files with the model; reads no weight."""
    with _collecting(problems):
        checkpoint.check(built.model)


@contextmanager
def _collecting(problems: list[Problem]) -> Iterator[None]:
    """Turn an error about a checkpoint or a plugin into a problem, and go on after the block."""
    try:
        yield
    except (CheckpointError, PluginError) as error:
        summary, *details = str(error).splitlines()
        kind = "checkpoint" if isinstance(error, CheckpointError) else "broken-plugin"
        problems.append(Problem(kind, summary, tuple(line.strip() for line in details)))


def _notes(found: Examination, built: Built, sizes: Sizes) -> Iterator[str]:
    """What the user should see on the card although it is no reason to refuse."""
    for variable, value in variables_for_tests().items():
        yield f"{variable}={value} is set: {VARIABLES_FOR_TESTS[variable]}"
    if found.settings.note:
        yield found.settings.note
    if found.machine.device == "cuda" and found.recording is not None and found.recording.reason:
        yield found.recording.describe()
    yield from found.host.notes()
    if found.config.max_model_len is None and sizes.max_model_len < built.model.max_positions:
        longest = built.model.max_positions
        yield f"the KV cache bounds the context to {sizes.max_model_len} of the model's {longest} tokens"
