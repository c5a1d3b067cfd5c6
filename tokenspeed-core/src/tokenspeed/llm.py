"""The engine in this process, for scripts and notebooks.

from tokenspeed import LLM, SamplingParams

with LLM("tiny", numerics="rl-bitwise") as llm:
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch

from tokenspeed import startup
from tokenspeed.chat import ChatTemplate, given_template
from tokenspeed.cli.progress import start_progress
from tokenspeed.config import EngineConfig
from tokenspeed.config_sources import config_from_arguments
from tokenspeed.engine.engine import Engine, EngineStats
from tokenspeed.engine.request import Request, SamplingParams
from tokenspeed.engine.seeds import sample_seeds
from tokenspeed.engine.validation import validate_params
from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.loading.generation_config import sampling_defaults
from tokenspeed.numerics.plan import Plan
from tokenspeed.progress import request_progress
from tokenspeed.results import CompletionOutput, RequestOutput, Score, absorb
from tokenspeed.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass
class _Job:
    """One sample on its way: the engine's request and where its updates go."""

    request: Request
    target: RequestOutput
    output: CompletionOutput


class LLM:
    """One model, loaded. Not thread-safe. Close it, or use it as a context manager, to give its memory back.

    `model` is a directory, an embedded model's name or a name in the local cache. `numerics` is the envelope (`auto`
    unless configured otherwise), `trainer` a trainer profile. `options` are the names of the command line's options
    (`max_model_len=2048`, `kernel={"gemm.linear": "aok.gemm.linear"}`); an unknown one raises ConfigError. A start that
    cannot keep its promise raises StartRefused with every reason. `progress` shows what is happening on standard error;
    None shows it on a terminal only.
    """

    def __init__(
        self,
        model: str | Path = "tiny",
        *,
        numerics: str | None = None,
        trainer: str | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> None:
        given = {"model": str(model), "numerics": numerics, "trainer": trainer, **options}
        config = config_from_arguments(**{name: value for name, value in given.items() if value is not None})
        self._start(config, progress)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: bool | None = None) -> Self:
        """Start from a finished configuration."""
        llm = cls.__new__(cls)
        llm._start(config, progress)
        return llm

    def _start(self, config: EngineConfig, progress: bool | None) -> None:
        given = given_template(config)
        prepared = startup.prepare(config)
        with start_progress(progress) as report:
            self._engine: Engine | None = startup.launch(prepared, report)
        self.plan: Plan = prepared.plan
        self._progress = progress
        self._given_template = given
        self.sampling_defaults = sampling_defaults(prepared.checkpoint.folder, config.generation_config)
        self._template: ChatTemplate | None = None
        self._ids = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine, for those who want to step it themselves. Raises EngineDead after `close`."""
        if self._engine is None:
            raise EngineDead("this LLM is closed")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError when it has none."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids", param="prompt", code="no_tokenizer")
        return tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt (a text, token ids, or a list of either); results in the order of the prompts.

        One `SamplingParams` serves all prompts, or give one for each; without any, `sampling_defaults` count (those of
        the checkpoint's generation_config.json, unless generation_config is "none"). `on_output(index, output)` is
        called as soon as a prompt is finished. Raises RequestError, before anything is computed, when a prompt or a
        parameter is wrong.
        """
        listed: list[Prompt] = _as_list(prompts)
        params = _params_for(sampling_params, len(listed), SamplingParams(**asdict(self.sampling_defaults)))
        for each in params:
            validate_params(each, self.engine.limits)
        encoded = [self.prompt_ids(prompt) for prompt in listed]
        targets = [
            RequestOutput(str(next(self._ids)), prompt if isinstance(prompt, str) else None, ids, [])
            for prompt, ids in zip(listed, encoded, strict=True)
        ]
        jobs = [job for target, each in zip(targets, params, strict=True) for job in _expand(target, each)]
        self._run(jobs, targets, on_output)
        return targets

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        conversations: list[Messages] = [messages] if _is_conversation(messages) else list(messages)  # type: ignore[list-item, arg-type]
        prompts = [
            self.chat_ids(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_variables,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds; ids are checked to be integers.

        Raises RequestError for anything else.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            if isinstance(prompt, _NO_LIST):
                raise TypeError("its items are no token ids")
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            message = f"a prompt is a text or a list of token ids, not {type(prompt).__name__}: {error}"
            raise RequestError(message, param="prompt", code="invalid_value") from None

    def chat_ids(self, messages: Messages, **options: Any) -> list[int]:
        """Token ids of a conversation; `options` as in `ChatTemplate.render`."""
        text = self._chat_template().render(messages, **options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def score(
        self,
        sequences: Prompt | Sequence[Prompt],
        *,
        temperature: float | Sequence[float] = 1.0,
        on_output: Callable[[int, Score], None] | None = None,
    ) -> list[Score]:
        """Teacher-forced log-probabilities of each sequence, a text or token ids; one temperature, or one for each.

        They are the numbers that generating the same tokens at the same temperature reports, bit for bit under
        `rl-bitwise`. Raises RequestError for a sequence that is wrong, or whose logits are not numbers.
        """
        listed = _as_list(sequences)
        temperatures = [temperature] * len(listed) if isinstance(temperature, int | float) else list(temperature)
        params = [
            SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=each, detokenize=False) for each in temperatures
        ]
        scores: dict[int, Score] = {}

        def keep(index: int, output: RequestOutput) -> None:
            scores[index] = _score(index, output)
            if on_output is not None:
                on_output(index, scores[index])

        self.generate(listed, params, on_output=keep)
        return [scores[index] for index in range(len(listed))]

    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        return self.engine.stats()

    def update_weights(
        self,
        source: str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        weight_version: str | None = None,
    ) -> str:
        """Exchange the weights: for a folder's, a `state_dict`, or (name, tensor) pairs (`model.named_parameters()`).

        All tensors of the model must come. Everything is checked before anything changes; CheckpointError names every
        tensor that is wrong, and the old weights stay. Cached prefixes are forgotten, and requests that are being
        stepped are recomputed. Returns the new version: `weight_version`, or one made of the weights' digest.
        """
        named = source.items() if isinstance(source, Mapping) else source
        self.engine.install_weights(self.engine.stage_weights(named), weight_version)
        return self.engine.weight_version

    def close(self) -> None:
        """Give the model and its cache back; the object is of no further use. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            device = engine.device
            del engine
            device.reclaim()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            source = self._given_template or self.tokenizer.chat_template
            if source is None:
                raise RequestError(
                    "this model has no chat template; give one as chat_template",
                    param="messages",
                    code="no_chat_template",
                )
            self._template = ChatTemplate(source, self.tokenizer.special_tokens)
        return self._template

    def _run(
        self,
        jobs: list[_Job],
        targets: list[RequestOutput],
        on_output: Callable[[int, RequestOutput], None] | None,
    ) -> None:
        """Step the engine until every job has ended; on any error nothing is left in the engine."""
        engine = self.engine
        waiting = {job.request.id: job for job in jobs}
        positions = {id(target): index for index, target in enumerate(targets)}
        try:
            for before, job in pairwise([None, *jobs]):
                assert job is not None
                engine.add(job.request, is_checked=before is not None and before.target is job.target)
            with request_progress(len(targets), self._progress) as advance:
                while waiting:
                    for update in engine.step():
                        job = waiting[update.id]
                        absorb(job.target, job.output, update, engine.tokenizer)
                        done = update.finish_reason is not None
                        if done:
                            del waiting[update.id]
                        advance(len(update.token_ids), int(done and job.target.finished))
                        if done and on_output is not None and job.target.finished:
                            on_output(positions[id(job.target)], job.target)
        finally:
            for request_id in waiting:
                engine.abort(request_id)


def _expand(target: RequestOutput, params: SamplingParams) -> list[_Job]:
    """The samples of one prompt; only the first one reads the prompt's logprobs, which all would share."""
    jobs = []
    for index, seed in enumerate(sample_seeds(params.seed, params.n)):
        output = CompletionOutput(index, seed=seed)
        target.outputs.append(output)
        own = msgspec.structs.replace(
            params, n=1, seed=seed, prompt_logprobs=params.prompt_logprobs if index == 0 else None
        )
        request_id = f"{target.request_id}-{index}"
        request = Request(id=request_id, prompt=target.prompt_token_ids, params=own, seed=seed)
        jobs.append(_Job(request, target, output))
    return jobs


def _score(index: int, output: RequestOutput) -> Score:
    (sample,) = output.outputs
    if sample.error is not None or output.prompt_logprobs is None:
        raise RequestError(f"sequence {index}: {sample.error}", param="prompt", code="model_error")
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    values = [None if position is None else position[token].logprob for token, position in pairs]
    return Score(output.prompt_token_ids, values)


_NO_LIST = (bytes, bytearray, Mapping, Set)
"""What can be gone through like a list, and is none of prompts or token ids."""


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One text or one list of ids becomes a list of one prompt. Raises RequestError for what is no list."""
    if isinstance(prompts, _NO_LIST) or not hasattr(prompts, "__len__"):
        message = f"prompts: expected a text, token ids, or a list of either, not {type(prompts).__name__}"
        raise RequestError(message, param="prompt", code="invalid_value")
    if isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts)):
        return [prompts]
    return list(prompts)


def _params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    if params is None or not isinstance(params, Sequence):
        return [_typed(default if params is None else params)] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling_params were given for {count} prompts",
            param="sampling_params",
            code="invalid_value",
        )
    return [_typed(each) for each in params]


def _typed(params: SamplingParams) -> SamplingParams:
    """`params` with the types that it declares, which its constructor does not check; NumPy's scalars are welcome.

    Raises RequestError.
    """
    if not isinstance(params, SamplingParams):
        message = f"sampling_params: expected SamplingParams, got {type(params).__name__}"
        raise RequestError(message, param="sampling_params", code="invalid_value")
    values = msgspec.structs.asdict(params).items()
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in values}
    try:
        return msgspec.convert(plain, SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_params: {error}", param="sampling_params", code="invalid_value") from None


def _is_conversation(messages: Messages | Sequence[Messages]) -> bool:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        message = f"messages: expected a list of messages, or of conversations, not {type(messages).__name__}"
        raise RequestError(message, param="messages", code="invalid_value")
    if odd := [item for item in messages if isinstance(item, str)]:
        raise RequestError(f"messages: {str(odd[0])[:50]!r} is no message", param="messages", code="invalid_value")
    return len(messages) > 0 and isinstance(messages[0], Mapping)
