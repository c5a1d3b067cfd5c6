"""A start, in order: from what the user asked for to a plan, and only then to an engine.

`examine` decides everything and loads nothing: machine, plugins, kernels, model, numerics, operator needs, selection,
sizes. It collects every problem. `prepare` refuses when there is one; `launch` imports the chosen kernels, loads the
weights and builds the engine. What a layer or kernel needs to know arrives as an argument; nothing here is global.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed import __version__
from tokenspeed.config import EngineConfig
from tokenspeed.config_sources import VARIABLES_FOR_TESTS, variables_for_tests
from tokenspeed.engine.buckets import Recording, plan_recording
from tokenspeed.errors import CheckpointError, PluginError, Problem, StartRefused
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import Pins, Selection, select
from tokenspeed.kernels.spec import WEIGHT_FORMAT, KernelSpec, Need
from tokenspeed.machine import Machine, read_machine
from tokenspeed.models.profile import ModelProfile
from tokenspeed.models.registry import ModelRegistry, model_class
from tokenspeed.numerics.certificate import Certificate, certify, file_digest
from tokenspeed.numerics.plan import Plan, machine_dict, make_plan
from tokenspeed.numerics.resolve import ResolvedNumerics, resolve
from tokenspeed.numerics.settings import GpuSettings, gpu_settings
from tokenspeed.plugins import PluginHost, load_plugins
from tokenspeed.sizing import Footprint, Sizes, choose_sizes

if TYPE_CHECKING:
    from tokenspeed.engine.engine import Engine, EngineOptions
    from tokenspeed.engine.sampler import SamplingOperators
    from tokenspeed.engine.wire import EngineInfo
    from tokenspeed.layers.context import LayerContext
    from tokenspeed.loading.checkpoint import Checkpoint
    from tokenspeed.models.base import CausalLM
    from tokenspeed.numerics.weights import WeightsDigest

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, in all); `in all` is 0 when it is not known."""


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
class Built:
    """A model without memory, its call sites, and the engine's own operators beside them."""

    model: CausalLM
    context: LayerContext
    operators: SamplingOperators


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


def start(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Decide, then load. Raises StartRefused with every problem."""
    return launch(prepare(config), progress)


def build(config: EngineConfig, progress: Progress) -> tuple[Engine, EngineInfo]:
    """`start` for an engine in a process of its own: the engine, and what the other process knows of it."""
    prepared = prepare(config)
    engine = launch(prepared, progress)
    return engine, describe(prepared, engine)


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
        dtype=_dtype_name(found.built),
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
    machine = machine or read_machine(config.device)
    host = load_plugins(config.plugins)
    problems += host.problems
    registry = KernelRegistry.from_plugins(host)
    numerics = _resolve(config, machine, host, registry, problems)
    settings, unkept = gpu_settings(numerics, machine.device, os.environ)
    problems += unkept
    found = Examination(config, machine, host, registry, numerics, (), settings)
    models = ModelRegistry.from_plugins(host)
    checkpoint, profile = _find_model(config, models, problems)
    found = replace(found, checkpoint=checkpoint, profile=profile)
    if checkpoint is not None and profile is not None:
        problems += _gate(config, profile, numerics)
        built = _build_on_meta(config, checkpoint, profile, numerics, problems)
        if built is not None:
            selection = select(built.context.needs(), registry, machine, _pins(config, numerics))
            problems += selection.problems
            problems += _check_parallel_layout(config, built, numerics)
            sizes = _choose_sizes(config, machine, built, problems)
            recording = _plan_recording(config, machine, selection, sizes)
            _store_as_kernels_read(built.model, selection.choices)
            if weights and not (weight_format(checkpoint) and selection.problems):
                _check_weights(checkpoint, built, problems)
            found = replace(found, built=built, selection=selection, sizes=sizes, recording=recording)
    return replace(found, problems=tuple(problems))


def launch(prepared: Prepared, progress: Progress | None = None) -> Engine:
    """Import the chosen kernels, try what they promise, load the weights and build the engine.

    Raises StartRefused when a chosen kernel cannot be imported or breaks a promise that the envelope rests on.
    """
    from tokenspeed.engine.engine import Engine
    from tokenspeed.loading.update import WeightStaging
    from tokenspeed.numerics.weights import version_of

    report = progress or (lambda _stage, _done, _total: None)
    with _refusing_without_memory(prepared):
        _import_kernels(prepared, report)
        proof = _prove_kernels(prepared, report)
        report("loading tokenizer", 0, 0)
        tokenizer = _load_tokenizer(prepared)
        certificate = _load_weights(prepared, report).with_kit(proof)
        report("allocating KV cache", 0, 0)
        staging = WeightStaging(prepared.checkpoint, lambda: rebuild(prepared), prepared.machine.device)
        options = replace(engine_options(prepared), weight_version=version_of(certificate.bits["weights"]["sha256"]))
        engine = Engine(prepared.built.model, prepared.built.operators, tokenizer, options, certificate, staging)
        for done, total in engine.warm_up():
            report("warming up", done, total)
    return engine


@contextmanager
def _refusing_without_memory(prepared: Prepared) -> Iterator[None]:
    """Turn a GPU that is full into a refusal with numbers: the plan's, and what is free."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        summary, *details = str(error).split(". ")
        pages = f"{prepared.sizes.num_pages} pages of KV cache were planned"
        remedy = (
            "free memory on the GPU, or give a smaller --kv-cache-memory, --max-num-batched-tokens or --max-num-seqs"
        )
        raise StartRefused([Problem("memory", summary, (*details, pages), remedy)]) from None


def rebuild(prepared: Prepared) -> CausalLM:
    """The prepared model once more, without memory and bound to the same kernels: a place for new weights."""
    from tokenspeed.layers.context import LayerContext

    old = prepared.built.context
    context = LayerContext(old.dtype, old.switches, old.features, old.traits, weight_format=old.weight_format)
    model = _build_model(prepared.checkpoint, prepared.plan.profile, context)
    _store_as_kernels_read(model, prepared.plan.choices)
    prepared.plan.bind(context.operations)
    return model


def load(prepared: Prepared, progress: Progress | None = None, *, rehash: bool = False) -> Certificate:
    """Import the chosen kernels and load the weights; what then determines the bits.

    `rehash` takes no earlier result for the weights' digest.
    """
    report = progress or (lambda _stage, _done, _total: None)
    _import_kernels(prepared, report)
    return _load_weights(prepared, report, rehash=rehash)


def _import_kernels(prepared: Prepared, report: Progress) -> None:
    from tokenspeed.engine.device import apply_settings

    _set_threads(prepared)
    if prepared.machine.device == "cuda":
        apply_settings(prepared.settings.tf32, prepared.settings.environment)
    report("importing kernels", 0, 0)
    prepared.plan.bind(prepared.built.context.operations)


def _prove_kernels(prepared: Prepared, report: Progress) -> Mapping[str, Any] | None:
    """The short form of the conformance kit, where kernels must keep a feature; what it found, for the certificate."""
    if not prepared.plan.numerics.features:
        return None
    from tokenspeed.testing.at_start import prove

    report("trying kernels", 0, 0)
    proof = prove(prepared.plan, prepared.host.kernels())
    if proof.problems:
        raise StartRefused(proof.problems)
    return proof.as_dict()


def _load_weights(prepared: Prepared, report: Progress, *, rehash: bool = False) -> Certificate:
    with hashing_weights(prepared, use_cache=not rehash) as weights:
        prepared.checkpoint.load(
            prepared.built.model,
            device=prepared.machine.device,
            progress=lambda done, total: report("loading weights", done, total),
        )
        report("hashing weights", 0, 0)
        return make_certificate(prepared, weights.result())


@contextmanager
def hashing_weights(prepared: Prepared, *, use_cache: bool = True) -> Iterator[Future[WeightsDigest]]:
    """Hash the tensors that the model reads while the caller does something else, as loading them.

    Enter it before the weights are loaded. An earlier result for the very same files is taken from the user's cache
    unless `use_cache` is off. The result raises CheckpointError when the files change meanwhile.
    """
    from tokenspeed.numerics.weights import default_cache, digest_files

    names = list(prepared.built.model.checkpoint_tensors())
    files = {prepared.checkpoint.tensors[name].file for name in names}
    with ThreadPoolExecutor(1, "tokenspeed-hash") as executor:
        cache = default_cache() if use_cache else None
        yield executor.submit(lambda: digest_files(files, cache=cache).only(names))


def make_certificate(prepared: Prepared, weights: WeightsDigest) -> Certificate:
    """The certificate of the engine that `prepared` describes; its kernels are bound and its weights loaded."""
    from tokenspeed.numerics.weights import tensor_digest

    plan, checkpoint, config = prepared.plan, prepared.checkpoint, prepared.config
    return certify(
        plan,
        weights,
        model_config=checkpoint.config,
        eos_ids=tuple(checkpoint.eos_token_ids),
        logprobs_mode=config.logprobs_mode,
        vocab_size=prepared.built.model.vocab_size,
        tables={name: tensor_digest(table) for name, table in prepared.built.model.tables()},
        variants=plan.variants(),
        provenance={
            "model": config.model,
            "machine": machine_dict(prepared.machine),
            "threads": _threads(prepared),
            "versions": {**plan.versions, "python": platform.python_version()},
            "envelope": plan.numerics.envelope,
            "trainer": plan.numerics.trainer,
            "variables_for_tests": variables_for_tests(),
            "tokenizer": file_digest(_tokenizer_folder(prepared) / "tokenizer.json"),
        },
    )


def describe(prepared: Prepared, engine: Engine) -> EngineInfo:
    """What the HTTP process knows of the engine."""
    from tokenspeed.engine.wire import EngineInfo
    from tokenspeed.kernels.operators import PAGE_SIZE
    from tokenspeed.numerics.card import as_text

    plan, sizes = prepared.plan, prepared.sizes
    return EngineInfo(
        model_path=str(prepared.checkpoint.folder),
        architecture=plan.profile.architecture,
        dtype=plan.dtype,
        logprobs_mode=prepared.config.logprobs_mode,
        limits=engine.limits,
        max_num_seqs=sizes.max_num_seqs,
        kv_tokens=sizes.num_pages * PAGE_SIZE,
        fingerprint=engine.fingerprint,
        weight_version=engine.weight_version,
        numerics={**plan.as_dict(), "certificate": engine.certificate and engine.certificate.as_dict()},
        card=as_text(plan.card()),
    )


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
                f"before a profile may list {numerics.envelope}, `tokenspeed numerics verify --full` must pass for it",
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


def _build_on_meta(
    config: EngineConfig,
    checkpoint: Checkpoint,
    profile: ModelProfile,
    numerics: ResolvedNumerics,
    problems: list[Problem],
) -> Built | None:
    """The model without memory, which records its operator needs, and the engine's own needs."""
    import torch

    from tokenspeed.engine.sampler import SamplingOperators
    from tokenspeed.layers.context import LayerContext

    with _collecting(problems):
        dtype = checkpoint.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        stored = weight_format(checkpoint)
        traits = {operator: dict(required) for operator, required in numerics.traits.items()}
        if stored:
            traits.setdefault("moe.experts", {})[WEIGHT_FORMAT] = stored
        context = LayerContext(dtype, numerics.switches, numerics.features, traits, weight_format=stored)
        model = _build_model(checkpoint, profile, context)
        operators = SamplingOperators.ask(
            context,
            dtype,
            order=numerics.switches["logprob_order"],
            block=numerics.logprob_block(model.vocab_size),
        )
        return Built(model, context, operators)
    return None


def _build_model(checkpoint: Checkpoint, profile: ModelProfile, context: LayerContext) -> CausalLM:
    # A kernel that reads the checkpoint's weight format is selected by trait; the layers' shapes do not change.
    plain = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    return model_class(profile)(plain, context)


def weight_format(checkpoint: Checkpoint) -> str:
    """How a quantised checkpoint stores its weights, as kernels declare it (`fp8`, `method:format`); empty if plain."""
    quantisation = checkpoint.config.get("quantization_config")
    if not quantisation:
        return ""
    parts = [quantisation.get("quant_method", "unknown"), quantisation.get("format", "")]
    return ":".join(part for part in parts if part)


def _store_as_kernels_read(model: CausalLM, choices: Mapping[Need, KernelSpec]) -> None:
    """Let projections hold the tensors that their kernels' weight format has in the place of a weight."""
    from tokenspeed.layers.linear import Linear

    for _, layer in model.weight_layers():
        if isinstance(layer, Linear) and (spec := choices.get(layer.linear.need)) and spec.stored:
            layer.store_as(spec.stored)


def _pins(config: EngineConfig, numerics: ResolvedNumerics) -> Pins:
    backend = numerics.switches["moe_backend"]
    return Pins(config.kernel, {} if backend == "auto" else {"moe.experts": backend})


def _choose_sizes(config: EngineConfig, machine: Machine, built: Built, problems: list[Problem]) -> Sizes:
    from tokenspeed.engine.kv_cache import bytes_per_page

    footprint = Footprint.of(
        sum(weight.numel() * weight.element_size() for weight in built.model.parameters()),
        built.context.needs(),
        tokens=config.max_num_batched_tokens,
        rows=config.max_num_seqs,
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
    if found.machine.device == "cuda" and found.recording is not None and found.recording.reason:
        yield found.recording.describe()
    yield from found.host.notes()
    if found.config.max_model_len is None and sizes.max_model_len < built.model.max_positions:
        longest = built.model.max_positions
        yield f"the KV cache bounds the context to {sizes.max_model_len} of the model's {longest} tokens"


def _dtype_name(built: Built) -> str:
    return str(built.context.dtype).removeprefix("torch.")


def _set_threads(prepared: Prepared) -> None:
    import torch

    torch.set_num_threads(_threads(prepared))


def _threads(prepared: Prepared) -> int:
    return prepared.config.threads or prepared.machine.cores


def _tokenizer_folder(prepared: Prepared) -> Path:
    given = prepared.config.tokenizer
    return Path(given) if given else prepared.checkpoint.folder


def _load_tokenizer(prepared: Prepared) -> Any:
    from tokenspeed.tokenizer import Tokenizer

    return Tokenizer.from_directory(_tokenizer_folder(prepared))


def engine_options(prepared: Prepared) -> EngineOptions:
    """The sizes and modes of the engine."""
    from tokenspeed.engine.engine import EngineOptions

    config, sizes = prepared.config, prepared.sizes
    return EngineOptions(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        num_pages=sizes.num_pages,
        prefix_caching=config.enable_prefix_caching,
        raw_logprobs=config.logprobs_mode == "raw",
        max_logprobs=config.max_logprobs,
        eos_ids=tuple(sorted(prepared.checkpoint.eos_token_ids)),
        device=prepared.machine.device,
        decode_buckets=prepared.recording.buckets,
        ahead=prepared.machine.device == "cuda",
    )
