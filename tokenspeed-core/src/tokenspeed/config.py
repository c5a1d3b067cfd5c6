"""What the user asked for: every option of the engine, frozen, with the set of options that were *given*.

The fields below are the one table that drives the command line, YAML files and environment variables
(`config_sources.py`) and the reference page. Knows no machine, plugin or model. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from tokenspeed.numerics.envelopes import ENVELOPES
from tokenspeed.numerics.switches import SWITCHES, Switch
from tokenspeed.options import Kind, Option

MODEL, NUMERICS, MACHINE, SCHEDULING, REPLIES, SERVER = (
    "Model",
    "Numerics",
    "Machine",
    "Scheduling and memory",
    "Replies",
    "Server",
)
GROUPS = (MODEL, NUMERICS, MACHINE, SCHEDULING, REPLIES, SERVER)


def _option(default: Any, kind: Kind, group: str, help_: str, **more: Any) -> Any:
    metadata = {"kind": kind, "group": group, "help": help_, **more}
    return field(default=default, metadata=metadata, repr=not more.get("secret", False))


def _empty() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of one engine. `switches` holds only the switches that were given, by name.

    `given` maps the name of every option that the user set himself to where he set it (`--tf32`,
    `environment variable TOKENSPEED_TF32`, `tf32 in serve.yaml`). Sizes are in bytes.
    """

    model: str = _option("tiny", "text", MODEL, "A directory, an embedded model's name, or a name in the local cache.")
    tokenizer: str | None = _option(None, "text", MODEL, "Directory of the tokenizer, if not the model's.")
    served_model_name: tuple[str, ...] = _option((), "names", MODEL, "Names that requests may use for the model.")
    chat_template: str | None = _option(None, "path", MODEL, "File with a Jinja chat template.")
    dtype: str = _option(
        "auto",
        "choice",
        MODEL,
        "Dtype of weights and activations; auto takes the checkpoint's.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    max_model_len: int | None = _option(
        None, "integer", MODEL, "Longest context in tokens; the model's own limit if not given.", minimum=1
    )

    numerics: str = _option(
        "auto", "choice", NUMERICS, "Envelope: what is promised about bits.", choices=tuple(ENVELOPES)
    )
    trainer: str | None = _option(
        None, "text", NUMERICS, "Trainer profile, as in megatron,vocab-shards=8.", metavar="NAME[,KEY=VALUE]"
    )
    kernel: Mapping[str, str] = field(
        default_factory=_empty,
        metadata={
            "kind": "pairs",
            "group": NUMERICS,
            "help": "Use kernel NAME for operator OP. May be repeated. Cannot outrank a promise.",
            "metavar": "OP=NAME",
        },
    )
    plugins: tuple[str, ...] | None = _option(
        None, "names", NUMERICS, "Load only these plugins; none loads no plugin.", metavar="A,B|none"
    )

    device: str = _option(
        "auto", "choice", MACHINE, "Where to run; auto takes a GPU if there is one.", choices=("auto", "cpu", "cuda")
    )
    threads: int | None = _option(
        None,
        "integer",
        MACHINE,
        "CPU threads for kernels; all that this process may use if not given.",
        minimum=1,
        maximum=1024,
    )

    tensor_parallel_size: int = _option(
        1, "integer", MACHINE, "Processes that share every layer. One is what there is; more are refused.", minimum=1
    )
    decode_graphs: bool = _option(
        True, "boolean", MACHINE, "Record decode steps as CUDA graphs, which changes no bit. GPU only."
    )

    max_num_seqs: int = _option(
        256, "integer", SCHEDULING, "Most requests that run at once; no more than tokens in a step.", minimum=1
    )
    max_num_batched_tokens: int = _option(
        2048, "integer", SCHEDULING, "Most tokens in one step; at least --max-num-seqs if not given.", minimum=1
    )
    kv_cache_memory: int | None = _option(
        None, "size", SCHEDULING, "Memory for the KV cache, as in 4GiB; sized by the machine if not given.", minimum=1
    )
    num_kv_pages: int | None = _option(
        None, "integer", SCHEDULING, "Pages of 16 tokens in the KV cache, instead of --kv-cache-memory.", minimum=1
    )
    enable_prefix_caching: bool = _option(
        True, "boolean", SCHEDULING, "Keep the KV of finished requests for requests that begin the same."
    )

    generation_config: str = _option(
        "auto",
        "choice",
        REPLIES,
        "What a request samples with that does not say: the checkpoint's generation_config.json (auto), or the "
        "OpenAI defaults (none).",
        choices=("auto", "none"),
    )
    logprobs_mode: str = _option(
        "processed",
        "choice",
        REPLIES,
        "Report logprobs after temperature (processed) or before (raw).",
        choices=("processed", "raw"),
    )
    max_logprobs: int = _option(
        20, "integer", REPLIES, "Most alternatives that a request may ask for; -1 for no limit.", minimum=-1
    )

    host: str = _option("127.0.0.1", "text", SERVER, "Address to listen on.")
    port: int = _option(8000, "integer", SERVER, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    api_key: tuple[str, ...] = _option((), "names", SERVER, "Keys that clients must send.", secret=True)
    control_key: str | None = _option(
        None, "text", SERVER, "Key for the routes that change weights or state.", secret=True
    )
    max_in_flight: int = _option(
        8192, "integer", SERVER, "Most samples that run or wait; beyond it, requests get 503.", minimum=1
    )
    max_body: int = _option(32 << 20, "size", SERVER, "Largest request body.", minimum=1024)
    metrics_compat: tuple[str, ...] = _option(
        (),
        "names",
        SERVER,
        "Emit the metrics under these prefixes too, as in vllm.",
        metavar="PREFIX",
        pattern="[a-zA-Z_][a-zA-Z0-9_]*",
    )
    drain_timeout_seconds: float = _option(
        30.0, "number", SERVER, "How long running requests may take to finish after SIGTERM.", minimum=0
    )
    log_level: str = _option(
        "info", "choice", SERVER, "How much to log.", choices=("debug", "info", "warning", "error")
    )

    switches: Mapping[str, str] = field(default_factory=_empty)
    given: Mapping[str, str] = field(default_factory=_empty)

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled, and the engine's own process receives its configuration that way.
        state = {option.name: getattr(self, option.name) for option in fields(self)}
        return _rebuild, ({**state, **{name: dict(state[name]) for name in _MAPPINGS}},)

    def public(self) -> dict[str, Any]:
        """The options as plain data for a report, without secrets."""
        shown = {name: getattr(self, name) for name, option in OPTIONS.items() if not option.secret}
        return {**shown, "kernel": dict(self.kernel), "switches": dict(self.switches), "given": dict(self.given)}


_MAPPINGS = ("kernel", "switches", "given")


def _rebuild(state: dict[str, Any]) -> EngineConfig:
    return EngineConfig(**state)


def _options() -> dict[str, Option]:
    found = {}
    for item in fields(EngineConfig):
        if item.metadata:
            default = item.default if item.default_factory is not _empty else _empty()
            found[item.name] = Option(name=item.name, default=default, **item.metadata)
    return found


def _switch_option(switch: Switch) -> Option:
    return Option(
        switch.name,
        "boolean" if switch.is_boolean else "text" if switch.any_name else "choice",
        NUMERICS,
        switch.meaning + (" GPU only." if switch.gpu_only else ""),
        default=None,
        choices=switch.values,
        metavar="|".join(switch.values) + ("|NAME" if switch.any_name else ""),
    )


OPTIONS: dict[str, Option] = _options()
"""Every option but the switches, by name, in the order of the help."""

SWITCH_OPTIONS: dict[str, Option] = {switch.name: _switch_option(switch) for switch in SWITCHES.values()}
"""The switches of `numerics.switches` as options."""
