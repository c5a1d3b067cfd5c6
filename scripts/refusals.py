"""Every refusal under `rl-bitwise`, provoked for real: what somebody did, and the message that he gets.

The cases run on a made-up machine, with models that are a `config.json` and plugins that are made for the moment, so
that the page says the same wherever it is written. `generate_reference.py` turns them into docs/reference/refusals.md;
`tests/plugins/test_refusals_page.py` checks that each message names what it must.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import importlib_metadata

from tokenspeed import __version__, plugins
from tokenspeed.config_sources import load_config
from tokenspeed.errors import ConfigError, Problem, RequestError
from tokenspeed.machine import Machine, named_machine
from tokenspeed.numerics.envelopes import BUILTIN_TRAINERS, DEFAULT_TRAINER, ENVELOPES
from tokenspeed.numerics.switches import SWITCHES
from tokenspeed.server.errors import ApiError

MACHINE = "cpu-avx2"
CPU = named_machine(MACHINE)
GPU = replace(named_machine("sm90"), gpu_memory_bytes=80 << 30, gpu_free_bytes=79 << 30)
CORE, KIT = ("tokenspeed-reference", "tokenspeed-models"), ("tokenspeed-kernels-aok",)

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

_KERNELS = """
from tokenspeed import BATCH_INVARIANT, KernelSpec, ModelProfile, Priority, hookimpl, trait_table

def kernel(name, operator, **more):
    return KernelSpec(name, operator, "acme", "nowhere:run", ({"x": "bfloat16", "weight": "bfloat16"},), **more)
"""

PLUGINS = {
    "acme-broken": "import libacme_cuda",
    "acme-ranked": """
@hookimpl
def tokenspeed_kernels():
    traits = trait_table({"combine_order": {"rank"}})
    return [kernel("acme.moe", "moe.experts", features=frozenset({BATCH_INVARIANT}), traits=traits)]
""",
    "acme-loud": """
@hookimpl
def tokenspeed_kernels():
    return [kernel("acme.linear", "gemm.linear", priority=10**6)]
""",
    "acme-models": """
@hookimpl
def tokenspeed_models():
    return [ModelProfile("AcmeForCausalLM", "tokenspeed_models.llama:LlamaForCausalLM")]
""",
}


@dataclass(frozen=True)
class Case:
    """`did` in words; the options and model of the start, what is installed, and which kinds of problem are shown.

    A kind may be followed by words that the problem's summary must hold.
    """

    title: str
    did: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    installed: tuple[str, ...] = (*CORE, *KIT)
    kinds: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    yaml: str = ""
    machine: Machine = CPU


CASES = (
    Case(
        "No kernel keeps the promise",
        "`--numerics rl-bitwise` without a distribution of batch-invariant kernels. Every operator is named; two of "
        "them are shown.",
        installed=CORE,
        kinds=("missing-kernel",),
    ),
    Case(
        "The kernel is in a plugin that cannot be imported",
        "`--numerics rl-bitwise`, and the plugin that would serve it is broken.",
        installed=(*CORE, "acme-broken"),
        kinds=("broken-plugin",),
    ),
    Case(
        "The kernel is in a plugin that was switched off",
        "`--numerics rl-bitwise --plugins tokenspeed-reference,tokenspeed-models`.",
        options={"plugins": "tokenspeed-reference,tokenspeed-models"},
        kinds=("disabled-plugin", "missing-kernel gemm.linear"),
    ),
    Case(
        "Experts are not combined in slot order",
        "A mixture of experts, with a kernel that combines its experts rank by rank.",
        model=MOE,
        installed=(*CORE, "acme-ranked"),
        kinds=("missing-kernel moe.experts",),
    ),
    Case(
        "Experts are split over ranks",
        "A mixture of experts and `--tensor-parallel-size 2`.",
        options={"tensor_parallel_size": 2},
        model=MOE,
        kinds=("parallel",),
    ),
    Case(
        "The model is not verified for the envelope",
        "`--numerics rl-bitwise` with a model whose profile does not list it.",
        model={"architectures": ["AcmeForCausalLM"]},
        installed=(*CORE, *KIT, "acme-models"),
        kinds=("profile",),
    ),
    Case(
        "Nobody supports the architecture",
        "A checkpoint of an unknown architecture.",
        model={"architectures": ["MambaForCausalLM"]},
        kinds=("profile",),
    ),
    Case(
        "A quantised checkpoint, and no kernel for its format",
        "`--numerics rl-bitwise` with an fp8 checkpoint.",
        model={"quantization_config": {"quant_method": "fp8"}},
        kinds=("missing-kernel",),
    ),
    Case("An unknown trainer", "`--trainer nobody`.", options={"trainer": "nobody"}, kinds=("unknown-value",)),
    Case(
        "A trainer without a promise",
        "`--numerics auto --trainer megatron`.",
        options={"numerics": "auto", "trainer": "megatron"},
        kinds=("conflict",),
    ),
    Case(
        "A pinned kernel that does not keep the promise",
        "`--numerics rl-bitwise --kernel gemm.linear=reference.gemm.linear`.",
        options={"kernel": {"gemm.linear": "reference.gemm.linear"}},
        kinds=("pin",),
    ),
    Case(
        "A plugin's priority",
        "`--numerics rl-bitwise`, and a plugin that ranks its kernel above all others. The kernel is not considered.",
        installed=(*CORE, "acme-loud"),
        kinds=("missing-kernel gemm.linear",),
    ),
    Case(
        "An environment variable",
        "`TOKENSPEED_TF32=1` and `--numerics rl-bitwise`.",
        environ={"TOKENSPEED_TF32": "1"},
        kinds=("conflict",),
    ),
    Case(
        "An environment variable that a library reads",
        "`NCCL_ALGO=Tree` and `--numerics rl-bitwise`, on a made-up GPU.",
        environ={"NCCL_ALGO": "Tree"},
        kinds=("environment",),
        machine=GPU,
    ),
    Case(
        "Too little memory on the GPU",
        "`--kv-cache-memory 100GiB` on a made-up GPU of 80 GiB.",
        options={"kv_cache_memory": 100 << 30},
        kinds=("memory",),
        machine=GPU,
    ),
    Case(
        "A configuration file",
        "`router_topk: fused` in the file, and `--numerics rl-bitwise`.",
        yaml="router_topk: fused\n",
        kinds=("conflict",),
    ),
    Case(
        "An escape hatch",
        "`TOKENSPEED_TRUST_KERNELS=1`. There is none.",
        environ={"TOKENSPEED_TRUST_KERNELS": "1"},
    ),
    Case("An unknown envelope", "`--numerics bitwise`.", options={"numerics": "bitwise"}),
)


def conflict_cases() -> Iterator[Case]:
    """Every switch of the table given a value that the envelope cannot have."""
    default = next(profile for profile in BUILTIN_TRAINERS if profile.name == DEFAULT_TRAINER)
    tight = {**ENVELOPES["rl-bitwise"].tight, **default.tight}
    for switch in SWITCHES.values():
        values = [value for value in switch.values if value not in (tight[switch.name], "auto")]
        value = values[0] if values else "acme"
        given = f"`{switch.spelled(value)}`"
        yield Case(switch.flag, f"{given} and `--numerics rl-bitwise`.", {switch.name: value}, kinds=("conflict",))


@contextmanager
def made_up_plugins() -> Iterator[Path]:
    """The made-up plugins on `sys.path`; the folder is also where models are put."""
    modules = [name.replace("-", "_") for name in PLUGINS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for plugin, source in PLUGINS.items():
            module = plugin.replace("-", "_")
            (folder / f"{module}.py").write_text(_KERNELS + source)
            metadata = folder / f"{module}-1.2.3.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 1.2.3\n")
            (metadata / "entry_points.txt").write_text(f"[tokenspeed]\n{plugin} = {module}\n")
        sys.path.insert(0, name)
        try:
            yield folder
        finally:
            sys.path.remove(name)
            for module in modules:
                sys.modules.pop(module, None)


def messages(case: Case, folder: Path) -> list[str]:
    """What the user sees, one text for each problem of the wanted kinds; a wrong option gives one text."""
    from tokenspeed.startup import examine

    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({**CONFIG, **case.model}))
    file = folder / "serve.yaml"
    file.write_text(case.yaml)
    options = {"model": str(model), "numerics": "rl-bitwise", **case.options}
    try:
        config = load_config(options, config_file=file if case.yaml else None, environ=case.environ)
    except ConfigError as error:
        return [str(error)]
    with only_installed(case.installed), mock.patch.dict(os.environ, case.environ):
        found = examine(config, case.machine, weights=False)
    shown = [problem.render() for problem in found.problems if _wanted(problem, case.kinds)]
    return [_anywhere(text.replace(str(model), "MODEL").replace(str(file), "serve.yaml")) for text in shown]


def _anywhere(text: str) -> str:
    """The message without what differs between checkouts: an editable install may carry an old version."""
    return re.sub(r"\b(tokenspeed(?:-[a-z]+)*) (?:1!)?\d+\.\d+\.\d+", rf"\1 {__version__}", text)


@contextmanager
def only_installed(distributions: tuple[str, ...]) -> Iterator[None]:
    """As if no other plugin than these were installed."""
    real = importlib_metadata.entry_points

    def entry_points(**selection: str) -> list[Any]:
        return [entry for entry in real(**selection) if entry.name in distributions]

    with mock.patch.object(plugins, "entry_points", entry_points):
        yield


def _wanted(problem: Problem, kinds: tuple[str, ...]) -> bool:
    """A kind, or a kind and a word of the summary."""
    return any(
        problem.kind == kind.split()[0] and all(word in problem.summary for word in kind.split()[1:]) for kind in kinds
    )


def refused_requests() -> Iterator[tuple[str, str]]:
    """Requests without a bitwise meaning: (what was asked, the message with HTTP status 400)."""
    from tokenspeed.engine.validation import Limits as EngineLimits
    from tokenspeed.server.limits import Limits
    from tokenspeed.server.openai import CompletionRequest

    limits = Limits(EngineLimits(vocab_size=256, max_model_len=128))
    for asked in (
        {"logprobs_mode": "raw_logprobs"},
        {"logprobs_mode": "top_p_renormalised"},
        {"logprobs": 21},
        {"use_beam_search": True},
        {"structured_outputs": {"regex": "a+"}},
        {"best_of": 4},
        {"sead": 7},
    ):

        def send(body: dict[str, Any] = asked) -> None:
            request = CompletionRequest.model_validate({"prompt": "x", **body})
            request.sampling_params(limits, logprobs=request.logprobs, max_tokens=1)

        yield f"`{json.dumps(asked)}`", _error_of(send)


def _error_of(call: Callable[[], None]) -> str:
    try:
        call()
    except (ApiError, RequestError) as error:
        return str(error)
    raise AssertionError("the request was not refused")


def refusals_page() -> str:
    """The page: every case with its message."""
    parts = [
        "# Refusals\n",
        "What a start says when it cannot keep what `--numerics rl-bitwise` promises. All problems are reported "
        "together, nothing is loaded, and the process ends with status 2. No environment variable, configuration file, "
        "plugin or pin gets around one. The messages below are real ones, for a small model, on a made-up CPU with "
        "AVX2 unless they say otherwise.\n",
    ]
    with made_up_plugins() as folder:
        for case in CASES:
            texts = messages(case, folder)
            if case.title.startswith("No kernel keeps"):
                texts = texts[:2]
            parts += [f"## {case.title}\n", f"{case.did}\n", _block(texts)]
        parts += [
            "## Flags that conflict\n",
            "Each switch of the envelope, given a value that it cannot have. A value that was given is never "
            "overwritten.\n",
        ]
        for case in conflict_cases():
            parts += [f"### `{case.title}`\n", f"{case.did}\n", _block(messages(case, folder))]
    parts += [
        "## Requests\n",
        "A request that asks for a number without a bitwise meaning, or for something that would be dropped in silence "
        "elsewhere, gets status 400. All other requests are served as usual.\n",
    ]
    for asked, text in refused_requests():
        parts += [f"{asked}\n", _block([text])]
    return "\n".join(parts)


def _block(texts: list[str]) -> str:
    return "```text\n" + "\n".join(texts) + "\n```\n"
