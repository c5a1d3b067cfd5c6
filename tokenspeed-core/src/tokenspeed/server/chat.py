"""`POST /v1/chat/completions`: messages through the model's own template, then as for any prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from tokenspeed.engine.request import PositionLogprobs, SamplingParams, TokenUpdate
from tokenspeed.server.errors import ApiError
from tokenspeed.server.generation import Generation, Job, Prompt, Sample, encoded
from tokenspeed.server.logprobs import LogprobWriter, base64_logprobs, cut
from tokenspeed.server.openai import ChatCompletionRequest, TokenizeRequest
from tokenspeed.server.service import Service
from tokenspeed.server.stream import event

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


async def read_messages(service: Service, body: ChatCompletionRequest | TokenizeRequest) -> Prompt:
    """The prompt that the chat template makes; the template adds the special tokens itself. Raises ApiError."""
    variables = dict(body.chat_template_kwargs or {})
    if taken := sorted(_RESERVED & variables.keys()):
        message = f"`chat_template_kwargs` must not hold `{taken[0]}`: it is a field of the request"
        raise ApiError(400, message, param="chat_template_kwargs")
    if isinstance(body, ChatCompletionRequest):
        variables["documents"] = body.documents
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` exclude each other"
        raise ApiError(400, message, param="continue_final_message")
    text = service.text.render_chat(
        body.messages or [],
        tools=body.tools,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        **variables,
    )
    ids = (await service.text.encode([text], add_special_tokens=bool(body.add_special_tokens)))[0]
    return Prompt(ids, text)


class ChatCompletion:
    """One request of the route, checked and ready to run. Build it with `prepare`."""

    def __init__(
        self, service: Service, body: ChatCompletionRequest, params: SamplingParams, prompt: Prompt, request_id: str
    ) -> None:
        self._service = service
        self._body = body
        self._params = params
        self._prompt = prompt
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.check_model(body.model),
            **service.limits.stated,
        }

    @classmethod
    async def prepare(cls, service: Service, body: ChatCompletionRequest, request_id: str) -> ChatCompletion:
        """Check everything that can be checked before the engine hears of it. Raises ApiError or RequestError."""
        service.check_model(body.model)
        body.check_tools()
        params = body.sampling_params(
            service.limits,
            logprobs=body.sample_logprobs,
            max_tokens=body.completion_tokens_limit,
            defaults=service.limits.defaults,
        )
        prompt = await read_messages(service, body)
        service.limits.check_samples(1, params.n)
        service.limits.check_prompt(prompt.ids, params)
        return cls(service, body, params, prompt, body.request_id or request_id)

    async def reply(self) -> dict[str, Any]:
        """The whole reply."""
        body = self._body
        with self._start() as generation:
            samples = await generation.finish()
            reply: dict[str, Any] = {
                **self._head,
                "choices": await encoded(samples, self._choice),
                "usage": generation.usage(),
                "system_fingerprint": generation.fingerprint(),
            }
        if body.return_token_ids:
            reply["prompt_token_ids"] = self._prompt.ids
        if body.return_prompt_text:
            reply["prompt_text"] = self._prompt.text
        if body.prompt_logprobs is not None:
            entries = cut(samples[0].prompt_logprobs or [], body.prompt_logprobs)
            reply["prompt_logprobs"] = base64_logprobs(entries) if body.in_base64 else self._writer().prompt(entries)
        if body.logprobs or body.prompt_logprobs is not None:
            reply["logprobs_mode"] = self._service.limits.logprobs_mode
        return reply

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events, without the final `[DONE]`."""
        options, writer = self._body.stream_options, self._writer()
        with self._start() as generation:
            started: set[int] = set()
            async for batch in generation.batches():
                data = b""
                for sample, update in batch:
                    if sample.index not in started:
                        started.add(sample.index)
                        data += self._event(generation, self._opening(sample), is_first=len(started) == 1)
                    data += self._event(generation, self._delta(sample, update, writer))
                yield data
            if options is not None and options.include_usage:
                yield event({**self._head, "choices": [], "usage": generation.usage()})

    def _start(self) -> Generation:
        return Generation(self._service, [Job(self._prompt, self._params, str(self._head["id"]))])

    def _writer(self) -> LogprobWriter:
        return LogprobWriter(
            self._service.text,
            ids_as_tokens=bool(self._body.return_tokens_as_token_ids),
            skip_special_tokens=self._params.skip_special_tokens,
        )

    def _event(self, generation: Generation, choice: dict[str, Any], *, is_first: bool = False) -> bytes:
        """One chunk with one choice; the very first chunk of the stream carries the prompt's ids."""
        options = self._body.stream_options
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._body.return_token_ids and is_first:
            chunk["prompt_token_ids"] = self._prompt.ids
        if choice["finish_reason"] is not None:
            chunk["system_fingerprint"] = generation.fingerprint()
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = generation.usage()
        return event(chunk)

    def _opening(self, sample: Sample) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, sample: Sample, update: TokenUpdate, writer: LogprobWriter) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": sample.index,
            "delta": {"content": update.text},
            "logprobs": self._logprobs(writer, update.logprobs or []),
            "finish_reason": update.finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = update.token_ids
        if update.finish_reason is not None:
            choice |= self._ending(sample)
        return choice

    def _choice(self, sample: Sample) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._logprobs(self._writer(), sample.logprobs),
            "finish_reason": sample.finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = sample.token_ids
        return choice | self._ending(sample)

    def _logprobs(self, writer: LogprobWriter, entries: list[PositionLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        if self._body.in_base64:
            return {"token_logprobs": base64_logprobs(entries)}
        return {"content": writer.chat(entries)}

    def _ending(self, sample: Sample) -> dict[str, Any]:
        """What a choice says when it is complete."""
        ending: dict[str, Any] = {"stop_reason": sample.stop_reason, "seed": sample.seed}
        if self._body.return_weight_versions:
            ending["weight_versions"] = sample.version_spans()
        return ending
