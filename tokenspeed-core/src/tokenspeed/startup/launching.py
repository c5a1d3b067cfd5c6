"""From a start without problems to an engine: kernels imported and tried, weights loaded, memory taken."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed.config import EngineConfig
from tokenspeed.config_sources import variables_for_tests
from tokenspeed.errors import Problem, StartRefused
from tokenspeed.numerics.certificate import Certificate, certify, file_digest
from tokenspeed.numerics.plan import machine_dict
from tokenspeed.sizing import SMALLER
from tokenspeed.startup.examination import Prepared, prepare
from tokenspeed.startup.meta_model import build_model, store_as_kernels_read

if TYPE_CHECKING:
    from tokenspeed.engine.engine import Engine
    from tokenspeed.engine.options import EngineOptions
    from tokenspeed.engine.wire import EngineInfo
    from tokenspeed.models.base import CausalLM
    from tokenspeed.numerics.weights import WeightsDigest


_NO_HOST_MEMORY = "can't allocate memory"
"""In the error of torch's allocator for CPUs, which has no class of its own."""

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, in all); `in all` is 0 when it is not known."""


def start(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Decide, then load. Raises StartRefused with every problem."""
    return launch(prepare(config), progress)


def build(config: EngineConfig, progress: Progress) -> tuple[Engine, EngineInfo]:
    """`start` for an engine in a process of its own: the engine, and what the other process knows of it."""
    prepared = prepare(config)
    engine = launch(prepared, progress)
    return engine, describe(prepared, engine)


def launch(prepared: Prepared, progress: Progress | None = None) -> Engine:
    """Import the chosen kernels, try what they promise, load the weights and build the engine.

    Raises StartRefused when a chosen kernel cannot be imported or breaks a promise that the envelope rests on, and when
    there is too little memory: with the plan's numbers, and what is free.
    """
    import torch

    try:
        return _launch(prepared, progress or (lambda _stage, _done, _total: None))
    except (torch.OutOfMemoryError, MemoryError) as error:
        summary, *details = str(error).split(". ")
    except RuntimeError as error:
        if _NO_HOST_MEMORY not in str(error):
            raise
        summary, details = f"{_NO_HOST_MEMORY}{str(error).partition(_NO_HOST_MEMORY)[2]}", []
    # Behind the handler, so that no traceback in the refusal's context keeps what was allocated.
    pages = f"{prepared.sizes.num_pages} pages of KV cache were planned"
    raise StartRefused([Problem("memory", summary, (*details, pages), SMALLER)])


def _launch(prepared: Prepared, report: Progress) -> Engine:
    from tokenspeed.engine.engine import Engine
    from tokenspeed.loading.update import WeightStaging
    from tokenspeed.numerics.weights import version_of

    _import_kernels(prepared, report)
    proof = _prove_kernels(prepared, report)
    report("loading tokenizer", 0, 0)
    tokenizer = _load_tokenizer(prepared)
    certificate = _load_weights(prepared, report).with_kit(proof)
    report("allocating KV cache", 0, 0)
    staging = WeightStaging(prepared.checkpoint, lambda: rebuild(prepared), prepared.machine.device)
    options = replace(
        engine_options(prepared),
        weight_version=version_of(certificate.bits["weights"]["sha256"]),
        warm_up_tokens=prepared.plan.row_counts(prepared.sizes.max_num_batched_tokens),
    )
    engine = Engine(prepared.built.model, prepared.built.operators, tokenizer, options, certificate, staging)
    for done, total in engine.warm_up():
        report("warming up", done, total)
    return engine


def rebuild(prepared: Prepared) -> CausalLM:
    """The prepared model once more, without memory and bound to the same kernels: a place for new weights."""
    from tokenspeed.layers.context import LayerContext

    old = prepared.built.context
    context = LayerContext(old.dtype, old.switches, old.features, old.traits, weight_format=old.weight_format)
    model = build_model(prepared.checkpoint, prepared.plan.profile, context)
    store_as_kernels_read(model, prepared.plan.choices)
    model.limit_context(prepared.sizes.max_model_len)
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
        apply_settings(prepared.settings)
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

    def digest() -> WeightsDigest:
        found = digest_files(files, cache=default_cache() if use_cache else None).only(names)
        prepared.checkpoint.check_unchanged()  # what was hashed is what is loaded
        return found

    with ThreadPoolExecutor(1, "tokenspeed-hash") as executor:
        yield executor.submit(digest)


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


def engine_options(prepared: Prepared) -> EngineOptions:
    """The sizes and modes of the engine."""
    from tokenspeed.engine.options import EngineOptions

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
