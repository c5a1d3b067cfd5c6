"""`tokenspeed generate MODEL < prompts.jsonl`: continue every prompt, one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tokenspeed.cli.jsonl import (
    OrderedLines,
    at_line,
    input_option,
    output_option,
    progress_option,
    read_lines,
    report_failures,
)
from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.config import MACHINE, MODEL, NUMERICS, REPLIES, SCHEDULING, EngineConfig

if TYPE_CHECKING:
    from tokenspeed.engine.request import SamplingParams
    from tokenspeed.llm import LLM
    from tokenspeed.results import RequestOutput


@click.command(cls=EngineCommand)
@engine_options(MODEL, NUMERICS, MACHINE, SCHEDULING, REPLIES)
@input_option
@output_option
@progress_option
@click.option("--max-tokens", type=int, help="For lines that give none.")
@click.option("--temperature", type=float, help="For lines that give none.")
@click.option("--seed", type=int, help="For lines that give none; each sample gets a fresh one otherwise.")
def generate(config: EngineConfig, source: BinaryIO, out: BinaryIO, progress: bool | None, **defaults: Any) -> None:
    """Continue the prompts of a JSONL file, one line in, one line out, in the same order.

    A line holds `prompt` (a text or a list of token ids) or `messages` (a conversation), and any sampling parameter:
    `max_tokens`, `temperature`, `top_p`, `top_k`, `n`, `seed`, `stop`, `logprobs`, … An `id` is handed through. The
    reply carries the prompt's token ids, the parameters, each sample's seed and the fingerprint: all that a replay
    needs.
    """
    from tokenspeed.engine.request import SamplingParams
    from tokenspeed.engine.validation import validate_params, validate_prompt
    from tokenspeed.llm import LLM

    names = SamplingParams.__struct_fields__
    rows = read_lines(source, fields=("prompt", "messages", *names))
    given = {name: value for name, value in defaults.items() if value is not None}
    # Before the start, so that a line with a mistake is found at once; then with the checkpoint's defaults.
    for row in rows:
        _params(row, names, given)
    with LLM.from_config(config, progress=progress) as llm:
        prompts = [_prompt(llm, row) for row in rows]
        params = [_params(row, names, {**llm.sampling_defaults.changed(), **given}) for row in rows]
        for row, prompt, asked in zip(rows, prompts, params, strict=True):
            with at_line(row):
                validate_params(asked, llm.engine.limits)
                validate_prompt(prompt, asked, llm.engine.limits)
        lines = OrderedLines(out)
        replies = llm.generate(
            prompts,
            params,
            on_output=lambda index, output: lines.write(index, _reply(llm, rows[index], params[index], output)),
        )
    samples = [sample for reply in replies for sample in reply.outputs]
    report_failures(sum(sample.error is not None for sample in samples), len(samples))


def _params(row: dict[str, Any], names: tuple[str, ...], given: dict[str, Any]) -> SamplingParams:
    import msgspec

    from tokenspeed.engine.request import SamplingParams
    from tokenspeed.errors import RequestError

    values = {**given, **{name: row[name] for name in names if name in row}}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    try:
        # JSON's keys are strings; `logit_bias` is keyed by token id.
        return msgspec.convert(values, SamplingParams, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(f"line {row['line']}: {error}") from error


def _prompt(llm: LLM, row: dict[str, Any]) -> list[int]:
    from tokenspeed.errors import RequestError

    prompt: Any = row.get("prompt")
    messages: Any = row.get("messages")
    with at_line(row):
        if (prompt is None) == (messages is None):
            raise RequestError("give `prompt` or `messages`, one of the two")
        return llm.prompt_ids(prompt) if messages is None else llm.chat_ids(messages)


def _reply(llm: LLM, row: dict[str, Any], params: SamplingParams, output: RequestOutput) -> dict[str, Any]:
    import msgspec

    asked = msgspec.structs.asdict(params)
    plain = msgspec.structs.asdict(type(params)())
    return {
        **({"id": row["id"]} if "id" in row else {}),
        **({"prompt": row["prompt"]} if isinstance(row.get("prompt"), str) else {}),
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_sample(sample) for sample in output.outputs],
        **({} if output.prompt_logprobs is None else {"prompt_logprobs": output.prompt_logprobs}),
        "cached_tokens": output.num_cached_tokens,
        "sampling_params": {name: value for name, value in asked.items() if value != plain[name]},
        "logprobs_mode": "raw" if llm.engine.options.raw_logprobs else "processed",
        "fingerprint": llm.engine.fingerprint,
    }


def _sample(sample: Any) -> dict[str, Any]:
    import msgspec

    row: dict[str, Any] = msgspec.to_builtins(sample, str_keys=True)
    return {name: value for name, value in row.items() if value is not None or name == "stop_reason"}
