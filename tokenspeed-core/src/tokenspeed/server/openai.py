"""The bodies of the OpenAI routes, and what they mean as `SamplingParams`.

Names, defaults and meanings are those of vLLM's OpenAI server; numbers are strict (`"5"` and `true` are not integers).
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tokenspeed.engine.request import SamplingParams
from tokenspeed.loading.generation_config import OPENAI_DEFAULTS, SamplingDefaults
from tokenspeed.server.errors import ApiError
from tokenspeed.server.fields import (
    IGNORED,
    UNSUPPORTED,
    Int64,
    ListOf,
    Penalty,
    StrictModel,
    TokenCount,
    UnitInterval,
)
from tokenspeed.server.limits import Limits
from tokenspeed.server.logprobs import LogprobsEncoding, check_encoding

DEFAULT_MAX_TOKENS = 16
_WITH_DEFAULTS = {field.name for field in fields(SamplingDefaults)}
TokenIds = ListOf[Annotated[int, Field(ge=0)]]


class StreamOptions(StrictModel):
    """Which usage records a stream carries."""

    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(StrictModel):
    """How to sample, under vLLM's names."""

    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: UnitInterval | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: TokenIds | None = None
    seed: Int64 | None = None
    max_tokens: TokenCount | None = None
    min_tokens: TokenCount | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None
    logprob_token_ids: TokenIds | None = None
    logprobs_mode: str | None = None
    logprobs_encoding: LogprobsEncoding | None = None

    def sampling_params(
        self,
        limits: Limits,
        *,
        logprobs: int | None,
        max_tokens: int | None,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
    ) -> SamplingParams:
        """Checked against the model and the server's limits. Raises ApiError or RequestError naming the field."""
        self.check_consistency(limits)
        own = {**asdict(defaults), **self.model_dump(include=_WITH_DEFAULTS, exclude_none=True)}
        params = SamplingParams(
            n=self.n or 1,
            temperature=own["temperature"],
            top_k=max(own["top_k"], 0),
            top_p=own["top_p"],
            min_p=own["min_p"],
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=own["repetition_penalty"],
            logit_bias=limits.logit_bias(self.logit_bias),
            allowed_token_ids=self.allowed_token_ids,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=[self.stop] if isinstance(self.stop, str) else list(self.stop or []),
            stop_token_ids=self.stop_token_ids or [],
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logprob_token_ids=self.logprob_token_ids,
            skip_special_tokens=self.skip_special_tokens is not False,
        )
        limits.check_params(params)
        check_encoding(self.logprobs_encoding, params)
        return params

    @property
    def in_base64(self) -> bool:
        """Log-probabilities are wanted as arrays in base64."""
        return self.logprobs_encoding == "base64"

    def check_consistency(self, limits: Limits) -> None:
        """Refuse fields that contradict each other or the server. Raises ApiError."""
        served = limits.logprobs_mode
        if self.logprobs_mode is not None and self.logprobs_mode.removesuffix("_logprobs") != served:
            message = f"`logprobs_mode`: this server reports {served} logprobs, not {self.logprobs_mode[:64]!r}"
            raise ApiError(400, message, param="logprobs_mode", reason="unsupported_field")


class RequestFields(SamplingFields):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    add_special_tokens: bool | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    best_of: int | None = None
    response_format: dict[str, Any] | None = None

    def check_consistency(self, limits: Limits) -> None:
        """As for sampling, and what streams and formats allow. Raises ApiError."""
        super().check_consistency(limits)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "`stream_options` is only allowed with `stream`: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "`prompt_logprobs` is not available with `stream`: true", param="prompt_logprobs")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "`best_of` is not supported: it must equal `n`", param="best_of")
        if self.response_format is not None and self.response_format.get("type") != "text":
            message = "`response_format`: only {'type': 'text'} is supported; structured outputs are not"
            raise ApiError(400, message, param="response_format", reason="unsupported_field")


class CompletionRequest(RequestFields):
    """`POST /v1/completions`."""

    ignored = IGNORED
    unsupported: ClassVar = UNSUPPORTED | {"suffix": ()}

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=-1)] | None = None

    @property
    def completion_tokens_limit(self) -> int:
        """`max_tokens` with its default; 0 is legal only with `echo`, where it asks for the prompt alone."""
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "`max_tokens` must be at least 1 (0 is legal with `echo`: true)", param="max_tokens")
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class ChatCompletionRequest(RequestFields):
    """`POST /v1/chat/completions`. Tools are shown to the model's template; calls are not parsed from its answer."""

    ignored = IGNORED | {"include_reasoning", "separate_reasoning", "stream_reasoning", "verbosity"}
    unsupported: ClassVar = UNSUPPORTED | {
        "audio": (),
        "chat_template": (),
        "echo": (),
        "function_call": ("none",),
        "functions": (),
        "media_io_kwargs": (),
        "modalities": (["text"],),
        "web_search_options": (),
    }

    messages: Annotated[ListOf[dict[str, Any]], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1)] | None = None
    max_completion_tokens: TokenCount | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: ListOf[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_prompt_text: bool | None = None

    @property
    def completion_tokens_limit(self) -> int | None:
        """`max_completion_tokens`, which wins over `max_tokens`; None fills the context."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit == 0:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise ApiError(400, f"`{name}` must be at least 1", param=name)
        return limit

    @property
    def sample_logprobs(self) -> int | None:
        """How many alternatives to report, None for no log-probabilities. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "`top_logprobs` requires `logprobs`: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_tools(self) -> None:
        """Refuse what would need tool calls to be parsed from the answer. Raises ApiError."""
        if self.tools is not None and not self.tools:
            raise ApiError(400, "`tools` must not be an empty list", param="tools")
        choice = self.tool_choice or ("auto" if self.tools else "none")
        if choice != "none":
            message = (
                'tool calls are not parsed by this server; with `tool_choice`: "none" the tools are shown to the model'
            )
            raise ApiError(
                400, message, param="tool_choice" if self.tool_choice else "tools", reason="unsupported_field"
            )


class TokenizeRequest(StrictModel):
    """`POST /tokenize`: `prompt`, or `messages` through the chat template."""

    ignored = frozenset({"media_io_kwargs", "mm_processor_kwargs"})
    unsupported: ClassVar = {"chat_template": ()}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[ListOf[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ListOf[dict[str, Any]] | None = None


class DetokenizeRequest(StrictModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: ListOf[int]
    skip_special_tokens: bool | None = None


class AbortRequests(StrictModel):
    """`POST /abort_requests`: an empty list aborts everything."""

    request_ids: ListOf[str] = Field(default_factory=list)


PauseMode = Literal["abort", "wait", "keep"]
