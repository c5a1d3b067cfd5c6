"""`tokenspeed numerics dump`: what a trainer computes for given tokens, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tokenspeed.cli.jsonl import read_lines
from tokenspeed.cli.options import EngineCommand, NumberRange, engine_options
from tokenspeed.cli.output import check_writable
from tokenspeed.config import MACHINE, MODEL, EngineConfig
from tokenspeed.engine.validation import MAX_TEMPERATURE
from tokenspeed.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from tokenspeed.verify.dump import Dump

LAYOUTS = ("alone", "padded-left", "padded-right", "packed")


@click.command(cls=EngineCommand)
@engine_options(MODEL, MACHINE)
@click.option("--prompts", type=click.File("rb"), required=True, help="JSONL: `prompt` or `token_ids` in each line.")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=check_writable,
    required=True,
    help="File to write.",
)
@click.option(
    "--trainer",
    "profile",
    default="transformers",
    metavar="NAME[,KEY=VALUE]",
    help="Whose order of additions the logprobs have.  [default: transformers]",
)
@click.option(
    "--generate",
    "new_tokens",
    type=click.IntRange(0),
    default=0,
    help="Let the engine continue each prompt by so many tokens first.",
)
@click.option("--layout", type=click.Choice(LAYOUTS), default="padded-right", help="How sequences share a batch.")
@click.option("--batch-size", default=8, type=click.IntRange(1), help="Sequences in a forward pass.")
@click.option("--temperature", default=1.0, type=NumberRange(0, MAX_TEMPERATURE), help="What logits are divided by.")
@click.option("--activations", is_flag=True, help="Record what every module computes, too. Large.")
@click.option("--stock", is_flag=True, help="Leave the model as transformers makes it, instead of adopting it.")
def dump(
    config: EngineConfig,
    prompts: BinaryIO,
    output: Path,
    profile: str,
    new_tokens: int,
    layout: Any,
    batch_size: int,
    temperature: float,
    activations: bool,
    stock: bool,
) -> None:
    """Teacher-force sequences in a transformers model and write the log-probabilities down, for `numerics align`.

    The model is adopted by `tokenspeed.trainer` unless --stock is given. With --generate the engine continues each
    prompt first, and the file holds what it reported, too.
    """
    import torch

    from tokenspeed.cli.progress import Counting
    from tokenspeed.trainer import adopt
    from tokenspeed.trainer.logprobs import order_of
    from tokenspeed.trainer.record import record
    from tokenspeed.verify.dump import write_dump

    try:
        order_of(profile)
    except ValueError as error:
        raise ConfigError(f"--trainer: {str(error).removeprefix('--trainer: ')}") from None
    rows = read_lines(prompts, fields=("prompt", "text", "token_ids"))
    folder = _folder(config)
    sequences = [_ids(folder, row) for row in rows]
    if not sequences:
        raise ConfigError("--prompts holds no lines")
    if not new_tokens and (short := [row["line"] for row, ids in zip(rows, sequences, strict=True) if len(ids) < 2]):
        raise RequestError(f"line {short[0]}: one token alone has no log-probability; give more, or --generate")
    replies = _generate(config, profile, sequences, new_tokens, temperature) if new_tokens else []
    if config.threads:
        torch.set_num_threads(config.threads)
    model = _load(folder, config.dtype)
    if not stock:
        adopt(model, plugins=config.plugins, kernel=config.kernel)
    with Counting("sequences", len(sequences)) as counting:
        found = record(
            model,
            [prompt + reply[0] for prompt, reply in zip(sequences, replies, strict=True)] if replies else sequences,
            layout=layout,
            trainer=profile,
            temperature=temperature,
            activations=activations,
            batch_size=batch_size,
            commit=_versions(stock),
            progress=counting.reach,
        )
    write_dump(_with_reports(found, sequences, [reply[1] for reply in replies]), output)
    click.echo(f"{output}: {len(found.sequences)} sequences, {sum(len(s.logprob) for s in found.sequences)} logprobs")


def _folder(config: EngineConfig) -> Path:
    from tokenspeed.loading.locate import locate_model
    from tokenspeed.models.registry import ModelRegistry
    from tokenspeed.plugins import load_plugins

    return locate_model(config.model, ModelRegistry.from_plugins(load_plugins(config.plugins)).embedded)


def _ids(folder: Path, row: dict[str, Any]) -> list[int]:
    from tokenspeed.tokenizer import Tokenizer

    text = row.get("prompt", row.get("text"))
    ids: Any = row.get("token_ids")
    if (text is None) == (ids is None):
        raise RequestError(f"line {row['line']}: give `prompt` or `token_ids`, one of the two")
    found = Tokenizer.from_directory(folder).encode(text) if isinstance(text, str) else ids
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found) or not found:
        raise RequestError(f"line {row['line']}: expected a text or a list of token ids with something in it")
    return found


def _generate(
    config: EngineConfig, profile: str, prompts: list[list[int]], new_tokens: int, temperature: float
) -> list[tuple[list[int], list[float]]]:
    """(token ids, reported log-probabilities) of the engine's continuation of each prompt."""
    from dataclasses import replace

    from tokenspeed.cli.progress import Waiting
    from tokenspeed.engine.request import SamplingParams
    from tokenspeed.llm import LLM

    bitwise = replace(config, numerics="rl-bitwise", trainer=profile)
    params = [
        SamplingParams(
            max_tokens=new_tokens, temperature=temperature, seed=seed, logprobs=0, ignore_eos=True, detokenize=False
        )
        for seed in range(len(prompts))
    ]
    with Waiting("continuing the prompts"), LLM.from_config(bitwise) as llm:
        samples = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [
        (s.token_ids, [entry[token].logprob for entry, token in zip(s.logprobs or [], s.token_ids, strict=True)])
        for s in samples
    ]


def _load(folder: Path, dtype: str) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _with_reports(found: Dump, prompts: list[list[int]], reports: list[list[float]]) -> Dump:
    from dataclasses import replace

    import torch

    if not reports:
        return found
    sequences = [
        replace(sequence, prompt_length=len(prompt), reported=torch.tensor(report, dtype=torch.float32))
        for sequence, prompt, report in zip(found.sequences, prompts, reports, strict=True)
    ]
    return replace(found, sequences=sequences)


def _versions(stock: bool) -> str:
    from importlib.metadata import version

    import torch
    import transformers

    adopted = "" if stock else f", adopted by tokenspeed {version('tokenspeed')}"
    return f"transformers {transformers.__version__}, torch {torch.__version__}{adopted}"
