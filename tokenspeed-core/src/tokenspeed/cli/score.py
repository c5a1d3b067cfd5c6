"""`tokenspeed score MODEL < texts.jsonl`: teacher-forced log-probabilities, one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tokenspeed.cli.jsonl import OrderedLines, at_line, input_option, output_option, progress_option, read_lines
from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.config import MACHINE, MODEL, NUMERICS, SCHEDULING, EngineConfig

if TYPE_CHECKING:
    from tokenspeed.llm import LLM
    from tokenspeed.results import Score


@click.command(cls=EngineCommand)
@engine_options(MODEL, NUMERICS, MACHINE, SCHEDULING)
@input_option
@output_option
@progress_option
def score(config: EngineConfig, source: BinaryIO, out: BinaryIO, progress: bool | None) -> None:
    """Report the logprob of every token of given sequences, one line in, one line out, in the same order.

    A line holds `text` or `token_ids`, and may hold `temperature` (1 if not given) and an `id`, which is handed
    through. `logprobs[i]` is the log-probability of `token_ids[i]` after the tokens before it; the first is null. Under
    `rl-bitwise` they are the numbers that a generation of the same tokens reports, bit for bit.
    """
    from tokenspeed.llm import LLM

    rows = read_lines(source, fields=("text", "token_ids", "temperature"))
    with LLM.from_config(config, progress=progress) as llm:
        sequences = [_sequence(llm, row) for row in rows]
        lines = OrderedLines(out)
        llm.score(
            sequences,
            temperature=[_temperature(row) for row in rows],
            on_output=lambda index, found: lines.write(index, _reply(llm, rows[index], found)),
        )


def _sequence(llm: LLM, row: dict[str, Any]) -> list[int]:
    from tokenspeed.engine.request import SamplingParams
    from tokenspeed.engine.validation import validate_prompt
    from tokenspeed.errors import RequestError

    text: Any = row.get("text")
    ids: Any = row.get("token_ids")
    with at_line(row):
        if (text is None) == (ids is None):
            raise RequestError("give `text` or `token_ids`, one of the two")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"`text` is {type(text).__name__}, expected a string")
        if isinstance(ids, str):
            raise RequestError("`token_ids` is a string, expected a list of token ids; a string goes into `text`")
        given: Any = text if ids is None else ids
        sequence = llm.prompt_ids(given)
        validate_prompt(sequence, SamplingParams(max_tokens=0), llm.engine.limits)
        return sequence


def _temperature(row: dict[str, Any]) -> float:
    from tokenspeed.errors import RequestError

    value = row.get("temperature", 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"line {row['line']}: `temperature` is {type(value).__name__}, expected a number")
    return float(value)


def _reply(llm: LLM, row: dict[str, Any], found: Score) -> dict[str, Any]:
    return {
        **({"id": row["id"]} if "id" in row else {}),
        "token_ids": found.token_ids,
        "tokens": [llm.tokenizer.token_text(token) for token in found.token_ids],
        "logprobs": found.logprobs,
        "total": found.total,
        "fingerprint": llm.engine.fingerprint,
    }
