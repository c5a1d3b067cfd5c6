"""`tokenspeed bench serve`: measure any server that speaks OpenAI's API, with the options and JSON keys of vLLM's."""

from __future__ import annotations

import asyncio
import json
import math
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokenspeed.cli.options import NumberRange
from tokenspeed.cli.output import unwritable

if TYPE_CHECKING:
    from tokenspeed.cli.bench_load import Outcome, Prompt

METRICS = ("ttft", "tpot", "itl", "e2el")
_NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


@click.command()
@click.option("--backend", type=click.Choice(["openai", "openai-chat", "vllm", "tokenspeed"]), default="openai")
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True, help="Where the server listens.")
@click.option("--endpoint", help="Path of the route, if it is not the usual one of the backend.")
@click.option("--model", help="Name of the model; the first of /v1/models if not given.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Key to send.")
@click.option("--dataset-name", type=click.Choice(["random", "custom"]), default="random", show_default=True)
@click.option("--dataset-path", type=click.Path(exists=True, dir_okay=False), help="JSONL of {prompt, output_tokens}.")
@click.option("--num-prompts", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--random-input-len", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--random-output-len", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--random-range-ratio", type=NumberRange(0, 1), default=0.0, help="Lengths vary by this share.")
@click.option(
    "--request-rate",
    type=NumberRange(0, min_open=True, infinite=True),
    default=float("inf"),
    help="Requests a second; inf sends all at once.",
)
@click.option("--burstiness", type=NumberRange(min=0.01), default=1.0, help="1: Poisson arrivals; less: burstier.")
@click.option("--max-concurrency", type=click.IntRange(min=1), help="Most requests at once.")
@click.option("--ignore-eos", is_flag=True, help="Always generate the full output length.")
@click.option("--temperature", type=NumberRange(0), help="Sampling temperature; the server's default if not given.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts and arrivals.")
@click.option("--num-warmups", type=click.IntRange(min=0), default=0, help="Requests before the measured ones.")
@click.option("--percentile-metrics", default="ttft,tpot,itl", show_default=True, help="Of ttft, tpot, itl, e2el.")
@click.option("--metric-percentiles", default="99", show_default=True, help="As in 50,90,99.")
@click.option("--goodput", multiple=True, metavar="METRIC:MS", help="A request counts when it keeps each limit.")
@click.option("--save-result", is_flag=True, help="Write a JSON file.")
@click.option("--save-detailed", is_flag=True, help="Write every request into the JSON file too.")
@click.option("--result-dir", type=click.Path(file_okay=False), help="Folder of the JSON file.")
@click.option("--result-filename", help="Name of the JSON file.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Further keys of the JSON file.")
@click.option("--disable-tqdm", is_flag=True, help="Show no progress.")
def serve(**options: Any) -> None:
    """Send requests to a server and report throughput and latencies.

    Exits with status 1 when a request failed.
    """
    from tokenspeed.cli.bench_load import Load, custom_prompts, random_prompts
    from tokenspeed.cli.bench_report import summarise

    limits = _goodput(options["goodput"])
    metadata = dict(_pair(text, "=", "--metadata") for text in options["metadata"])
    chosen = _chosen_metrics(options["percentile_metrics"])
    percentiles = [_number("--metric-percentiles", text, most=100) for text in options["metric_percentiles"].split(",")]
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    saved = _result_file(options, date)
    is_chat = options["backend"] == "openai-chat"
    load = Load(
        base_url=options["base_url"],
        endpoint=options["endpoint"] or ("/v1/chat/completions" if is_chat else "/v1/completions"),
        is_chat=is_chat,
        model=options["model"],
        api_key=options["api_key"],
        ignore_eos=options["ignore_eos"],
        temperature=options["temperature"],
    )
    if options["dataset_name"] == "custom":
        if options["dataset_path"] is None:
            raise click.UsageError("--dataset-name custom needs --dataset-path")
        prompts = custom_prompts(Path(options["dataset_path"]), options["num_prompts"], options["random_output_len"])
    else:
        prompts = random_prompts(
            options["num_prompts"],
            options["random_input_len"],
            options["random_output_len"],
            ratio=options["random_range_ratio"],
            seed=options["seed"],
            as_text=is_chat,
        )
    outcomes, seconds = asyncio.run(_run(load, prompts, options))
    result = {
        "date": date,
        "backend": options["backend"],
        "model_id": load.model,
        "num_prompts": len(prompts),
        "request_rate": options["request_rate"] if options["request_rate"] != float("inf") else "inf",
        "burstiness": options["burstiness"],
        "max_concurrency": options["max_concurrency"],
        **metadata,
        **summarise(outcomes, seconds, METRICS, percentiles, limits),
    }
    _print(result, chosen, percentiles)
    if saved is not None:
        _save(result, outcomes, saved, detailed=options["save_detailed"])
    if result["failed"]:
        errors = sorted({outcome.error for outcome in outcomes if outcome.error})
        click.echo(f"{result['failed']} requests failed: {'; '.join(errors[:3])}", err=True)
        raise click.exceptions.Exit(1)


async def _run(load: Any, prompts: list[Prompt], options: dict[str, Any]) -> tuple[list[Outcome], float]:
    from tokenspeed.cli.bench_load import arrivals
    from tokenspeed.cli.progress import Counting

    await load.find_model()
    for prompt in prompts[: options["num_warmups"]]:
        await load.send(prompt)
    at = arrivals(len(prompts), options["request_rate"], options["burstiness"], options["seed"])
    with Counting("requests", len(prompts), hidden=options["disable_tqdm"]) as counting:
        started = time.perf_counter()
        outcomes = await load.send_all(prompts, at, options["max_concurrency"], counting.advance)
        return outcomes, time.perf_counter() - started


def _chosen_metrics(text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in METRICS]:
        raise click.UsageError(f"--percentile-metrics: {unknown[0]!r} is not one of {', '.join(METRICS)}")
    return chosen


def _goodput(texts: tuple[str, ...]) -> dict[str, float]:
    limits = {}
    for name, value in (_pair(part, ":", "--goodput") for text in texts for part in text.split()):
        if name not in ("ttft", "tpot", "e2el"):
            raise click.UsageError(f"--goodput: {name!r} is not one of ttft, tpot, e2el")
        limits[name] = _number("--goodput", value)
    return limits


def _number(option: str, text: str, most: float = math.inf) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most or number == math.inf:
        raise click.UsageError(f"{option}: {text.strip()!r} is no number from 0" + f" to {most:g}" * (most < math.inf))
    return number


def _pair(text: str, separator: str, option: str) -> tuple[str, str]:
    key, found, value = text.partition(separator)
    if not found or not key:
        raise click.UsageError(f"{option}: expected KEY{separator}VALUE, got {text!r}")
    return key, value


def _print(result: dict[str, Any], chosen: list[str], percentiles: list[float]) -> None:
    from tokenspeed.cli.bench_report import percentile_name

    rows = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Benchmark duration (s)", result["duration"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s)", result["request_goodput"]))
    click.echo(" Serving Benchmark Result ".center(60, "="))
    _rows(rows)
    for name in chosen:
        click.echo(f" {_NAMES[name]} ".center(60, "-"))
        keys = ["mean", "median", *map(percentile_name, percentiles)]
        _rows([(f"{key.capitalize()} {name.upper()} (ms)", result[f"{key}_{name}_ms"]) for key in keys])
    click.echo("=" * 60)


def _rows(rows: list[tuple[str, Any]]) -> None:
    for name, value in rows:
        click.echo(f"{name + ':':<44}{value:>16.2f}" if isinstance(value, float) else f"{name + ':':<44}{value:>16}")


def _result_file(options: dict[str, Any], date: str) -> Path | None:
    """Where the result goes, if it is kept; found out before anything is measured."""
    if not (options["save_result"] or options["save_detailed"]):
        return None
    path = Path(options["result_dir"] or ".") / (options["result_filename"] or f"{options['backend']}-{date}.json")
    if fault := unwritable(path, makes_folders=True):
        raise click.UsageError(f"{path} cannot be written: {fault}")
    return path


def _save(result: dict[str, Any], outcomes: list[Outcome], path: Path, *, detailed: bool) -> None:
    if detailed:
        result |= {
            "input_lens": [outcome.input_tokens for outcome in outcomes],
            "output_lens": [outcome.output_tokens for outcome in outcomes],
            "ttfts": [outcome.ttft for outcome in outcomes],
            "itls": [outcome.itls for outcome in outcomes],
            "latencies": [outcome.latency for outcome in outcomes],
            "start_times": [outcome.started for outcome in outcomes],
            "generated_texts": [outcome.text for outcome in outcomes],
            "errors": [outcome.error for outcome in outcomes],
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2))
    click.echo(f"wrote {path}")
