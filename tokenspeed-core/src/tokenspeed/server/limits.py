"""What one HTTP request may ask for, beside what the engine checks for every sample, so that it harms nobody else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.engine.request import SamplingParams
from tokenspeed.engine.validation import Limits as EngineLimits
from tokenspeed.engine.validation import validate_params, validate_prompt
from tokenspeed.errors import ContextOverflow
from tokenspeed.loading.generation_config import OPENAI_DEFAULTS, SamplingDefaults
from tokenspeed.server.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """`engine` is what one sample may be. `max_samples` bounds prompts times `n` of one HTTP request, `max_in_flight`
    the samples of all of them together (beyond it: 503), `max_body_bytes` a request body.
    `defaults` is how requests of the OpenAI routes sample that do not say."""

    engine: EngineLimits
    logprobs_mode: str = "processed"
    max_samples: int = 4096
    max_in_flight: int = 8192
    max_body_bytes: int = 32 << 20
    defaults: SamplingDefaults = OPENAI_DEFAULTS

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""
        return self.engine.vocab_size

    @property
    def stated(self) -> dict[str, Any]:
        """What every reply of the OpenAI routes says of the defaults, where they are not OpenAI's own."""
        changed = self.defaults.changed()
        return {"sampling_defaults": changed} if changed else {}

    def check_params(self, params: SamplingParams) -> None:
        """Raises ApiError or RequestError. The sentence about logprobs is the one that clients search for."""
        for what, count in (("sample", params.logprobs), ("prompt", params.prompt_logprobs)):
            asked = self.vocab_size if count == -1 else count
            if asked is not None and 0 <= self.engine.max_logprobs < asked:
                most = self.engine.max_logprobs
                message = f"Requested {what} logprobs of {asked}, which is greater than max allowed: {most}"
                param = "logprobs" if what == "sample" else "prompt_logprobs"
                raise ApiError(400, message, param=param, reason="invalid_value")
        validate_params(params, self.engine)

    def check_prompt(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError or ContextOverflow."""
        if len(ids) > self.max_model_len - (params.max_tokens != 0):
            raise self.overflow(str(len(ids)))
        validate_prompt(ids, params, self.engine)

    def check_samples(self, prompts: int, n: int) -> None:
        """Raises ApiError when one request asks for too many samples."""
        if prompts * n > self.max_samples:
            message = (
                f"{prompts} prompts with n={n} are {prompts * n} samples; one request may ask for {self.max_samples}"
            )
            raise ApiError(400, message, param="prompt" if prompts > n else "n", reason="invalid_value")

    def logit_bias(self, bias: Mapping[str, Any] | None) -> dict[int, float] | None:
        """JSON's string keys as token ids. Raises ApiError for a key that is no id, or a value that is no number."""
        if not bias:
            return None
        out: dict[int, float] = {}
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < self.vocab_size):
                message = f"logit_bias: token id {key[:32]!r} is not in the vocabulary (0 to {self.vocab_size - 1})"
                raise ApiError(400, message, param="logit_bias", reason="token_out_of_vocabulary")
            if type(value) not in (int, float):
                raise ApiError(400, f"logit_bias.{key}: expected a number", param="logit_bias", reason="invalid_value")
            out[int(key)] = value
        return out

    def overflow(self, tokens: str) -> ContextOverflow:
        """The refusal of a prompt of `tokens` tokens (a number, possibly with `at least`), in vLLM's words."""
        return ContextOverflow(
            f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains "
            f"{tokens} input tokens, which leaves no room for an output token. Please shorten the prompt.",
            param="input_tokens",
            code="context_length_exceeded",
        )

    def output_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """Tokens that may be generated: what was asked for, clamped to the room that the context leaves."""
        room = self.max_model_len - prompt_tokens
        return room if asked is None else min(asked, room)
