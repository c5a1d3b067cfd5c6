"""Is one request well-formed? Checked at the door, so that a bad request harms nobody else.

Knows the limits of an engine; imports no torch, so the HTTP process checks with the same rules. Every refusal is a
`RequestError` with the offending field's OpenAI name and a stable code.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from tokenspeed.engine.request import Request, SamplingParams
from tokenspeed.engine.stopping import StopRules
from tokenspeed.errors import ContextOverflow, RequestError

MAX_N = 1024
MAX_TEMPERATURE = 1e4
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 4096
MAX_LOGPROB_TOKEN_IDS = 128


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine accepts.

    `vocab_size` counts the columns of the logits; `max_model_len` the tokens of prompt and output together;
    `max_logprobs` the alternatives that a request may ask for (-1: the whole vocabulary). `eos_ids` end a sequence;
    all of them are in the vocabulary.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    eos_ids: tuple[int, ...] = ()


def validate(request: Request, limits: Limits) -> None:
    """Raise RequestError unless the engine can run `request` without harm to anybody."""
    validate_prompt(request.prompt, request.params, limits)
    validate_params(request.params, limits)
    _check_int("seed", request.seed, -(2**63), 2**63 - 1)


def validate_prompt(prompt: Sequence[int], params: SamplingParams, limits: Limits) -> None:
    """Token ids in the vocabulary, at least one, and room for what `params` asks for."""
    if len(prompt) == 0:
        raise RequestError("the prompt has no tokens; give at least one", param="prompt", code="empty_prompt")
    room = limits.max_model_len - (0 if params.max_tokens == 0 else 1)
    if len(prompt) > room:
        output = "" if params.max_tokens == 0 else ", prompt and at least one output token together"
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens; this model's context holds {limits.max_model_len} tokens{output}",
            param="prompt",
            code="context_length_exceeded",
        )
    _check_ids("prompt", prompt, limits)


def validate_params(params: SamplingParams, limits: Limits) -> None:
    """Every parameter in its range."""
    _check_int("n", params.n, 1, MAX_N)
    _check_float("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _check_int("top_k", params.top_k, -1, 2**31 - 1)
    _check_float("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _check_float("min_p", params.min_p, 0.0, 1.0)
    _check_float("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_float("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    # Symmetric, and far from where a logit divided by it would be infinite in fp32.
    _check_float("repetition_penalty", params.repetition_penalty, 1e-4, 1e4)
    if params.seed is not None:
        _check_int("seed", params.seed, -(2**63), 2**63 - 1)
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 0, 2**31 - 1)
    _check_int("min_tokens", params.min_tokens, 0, 2**31 - 1)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _range("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")
    _check_edits(params, limits)
    _check_stops(params, limits)
    _check_logprobs(params, limits)


def _check_edits(params: SamplingParams, limits: Limits) -> None:
    if params.logit_bias:
        if len(params.logit_bias) > MAX_LOGIT_BIAS:
            raise _range("logit_bias", f"{len(params.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS} entries")
        _check_ids("logit_bias", params.logit_bias, limits)
        for bias in params.logit_bias.values():
            _check_float("logit_bias", bias, -100.0, 100.0)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise _range("allowed_token_ids", "an empty list", "at least one token id")
        _check_ids("allowed_token_ids", params.allowed_token_ids, limits)
        if params.min_tokens and StopRules.of(params, limits.eos_ids).token_ids.issuperset(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids holds tokens only that end a reply, which min_tokens forbids; allow another token",
                param="allowed_token_ids",
                code="invalid_value",
            )


def _check_stops(params: SamplingParams, limits: Limits) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise _range("stop", f"{len(params.stop)} strings", f"at most {MAX_STOP_STRINGS}")
    for stop in params.stop:
        if not stop:
            raise _range("stop", "an empty string", "strings of at least one character")
        if len(stop) > MAX_STOP_LENGTH:
            raise _range("stop", f"a string of {len(stop)} characters", f"at most {MAX_STOP_LENGTH} characters")
    if params.stop and not params.detokenize:
        raise RequestError("stop strings need detokenize to be true", param="stop", code="invalid_value")
    _check_ids("stop_token_ids", params.stop_token_ids, limits)


def _check_logprobs(params: SamplingParams, limits: Limits) -> None:
    for field, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is None:
            continue
        _check_int(field, value, -1, 2**31 - 1)
        most = limits.max_logprobs
        if most >= 0 and (value == -1 or value > most):
            asked = "the whole vocabulary (-1)" if value == -1 else str(value)
            raise _range(field, asked, f"at most {most}; the server's max_logprobs option raises this")
    if params.logprob_token_ids is not None:
        if params.logprobs is None:
            raise RequestError(
                "logprob_token_ids needs logprobs to be set", param="logprob_token_ids", code="invalid_value"
            )
        if len(params.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise _range(
                "logprob_token_ids", f"{len(params.logprob_token_ids)} ids", f"at most {MAX_LOGPROB_TOKEN_IDS}"
            )
        _check_ids("logprob_token_ids", params.logprob_token_ids, limits)


def _check_ids(field: str, ids: Collection[int], limits: Limits) -> None:
    # Long prompts pass three scans in C; only a refusal walks the ids one by one.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < limits.vocab_size):
        return
    bad = next(i for i in ids if type(i) is not int or not 0 <= i < limits.vocab_size)
    raise RequestError(
        f"{field}: token id {bad!r} is not in the vocabulary (0 to {limits.vocab_size - 1})",
        param=field,
        code="token_out_of_vocabulary",
    )


def _check_int(field: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _range(field, value, f"an integer from {low} to {high}")


def _check_float(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):
        raise _range(field, value, f"{'more than' if open_low else 'from'} {low:g} to {high:g}")


def _range(field: str, value: object, expected: str) -> RequestError:
    return RequestError(f"{field}: {value} is out of range; expected {expected}", param=field, code="invalid_value")
