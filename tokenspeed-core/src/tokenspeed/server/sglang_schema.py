"""The body of SGLang's `/generate`, and what it means as jobs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from tokenspeed.engine.request import SamplingParams
from tokenspeed.server.errors import ApiError
from tokenspeed.server.fields import Int64, ListOf, Penalty, StrictModel, TokenCount, UnitInterval
from tokenspeed.server.limits import Limits
from tokenspeed.server.logprobs import LogprobsEncoding, check_encoding
from tokenspeed.server.openai import TokenIds

DEFAULT_MAX_NEW_TOKENS = 128


class SglangSampling(StrictModel):
    """SGLang's `sampling_params`. The seed is called `sampling_seed`; another spelling is refused, not ignored."""

    ignored = frozenset({"spaces_between_special_tokens", "stream_interval"})
    unsupported: ClassVar = {
        "custom_params": (),
        "ebnf": (),
        "json_schema": (),
        "regex": (),
        "stop_regex": (),
        "structural_tag": (),
    }

    max_new_tokens: TokenCount | None = None
    min_new_tokens: TokenCount | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: UnitInterval | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Any] | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Int64 | None = None


class GenerateRequest(StrictModel):
    """`POST /generate`. Lists of texts, ids, parameters and rids describe a batch."""

    ignored = frozenset(
        {
            "background",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "cache_salt",
            "conversation_id",
            "custom_labels",
            "data_parallel_rank",
            "extra_key",
            "log_metrics",
            "priority",
            "routing_key",
            "validation_time",
        }
    )
    unsupported: ClassVar = {
        "audio_data": (),
        "custom_logit_processor": (),
        "image_data": (),
        "input_embeds": (),
        "lora_path": (),
        "modalities": (),
        "return_flat_raw_top_logprobs": (),
        "return_hidden_states": (),
        "return_routed_experts": (),
        "return_sampling_mask": (),
        "sampling_logprobs_mode": (),
        "session_params": (),
        "video_data": (),
    }

    text: str | ListOf[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SglangSampling | ListOf[SglangSampling] = Field(default_factory=SglangSampling)
    rid: str | ListOf[str] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0)] | None = None
    token_ids_logprob: TokenIds | None = None
    return_text_in_logprobs: bool | None = None
    logprobs_encoding: LogprobsEncoding | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None

    @property
    def prompt(self) -> Any:
        """`text` or `input_ids`, exactly one of them. Raises ApiError."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "give either `text` or `input_ids`", param="input_ids")
        return self.text if self.text is not None else self.input_ids

    @property
    def is_batch(self) -> bool:
        """The reply is a list."""
        value = self.prompt
        return isinstance(value, list) and bool(value) and isinstance(value[0], str | list)

    def sampling_of(self, count: int) -> list[SglangSampling]:
        """One set of parameters for each prompt. Raises ApiError when their numbers differ."""
        given = self.sampling_params
        if not isinstance(given, list):
            return [given] * count
        if len(given) != count:
            message = f"`sampling_params` has {len(given)} entries for {count} prompts"
            raise ApiError(400, message, param="sampling_params")
        return given

    def rids(self, count: int, fallback: str) -> list[str]:
        """An id for each prompt. Raises ApiError when their numbers differ."""
        if self.rid is None:
            return [fallback] * count
        if isinstance(self.rid, str):
            return [self.rid] * count
        if len(self.rid) != count:
            raise ApiError(400, f"`rid` has {len(self.rid)} entries for {count} prompts", param="rid")
        return self.rid

    def params(self, asked: SglangSampling, limits: Limits) -> SamplingParams:
        """Checked parameters of one prompt. Raises ApiError or RequestError."""
        start = -1 if self.logprob_start_len is None else self.logprob_start_len
        wants_prompt = bool(self.return_logprob) and start >= 0
        if self.token_ids_logprob and wants_prompt:
            message = "`token_ids_logprob` is reported for output tokens only; leave `logprob_start_len` at -1"
            raise ApiError(400, message, param="token_ids_logprob", reason="unsupported_field")
        top = self.top_logprobs_num or 0
        params = SamplingParams(
            n=asked.n or 1,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_k=max(asked.top_k or 0, 0),
            top_p=1.0 if asked.top_p is None else asked.top_p,
            min_p=asked.min_p or 0.0,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
            logit_bias=limits.logit_bias(asked.logit_bias),
            seed=asked.sampling_seed,
            max_tokens=DEFAULT_MAX_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens,
            min_tokens=asked.min_new_tokens or 0,
            stop=[asked.stop] if isinstance(asked.stop, str) else list(asked.stop or []),
            stop_token_ids=asked.stop_token_ids or [],
            include_stop_str_in_output=bool(asked.no_stop_trim),
            ignore_eos=bool(asked.ignore_eos),
            logprobs=top if self.return_logprob else None,
            prompt_logprobs=top if wants_prompt else None,
            logprob_token_ids=self.token_ids_logprob if self.return_logprob else None,
            skip_special_tokens=asked.skip_special_tokens is not False,
        )
        limits.check_params(params)
        check_encoding(self.logprobs_encoding, params)
        return params
