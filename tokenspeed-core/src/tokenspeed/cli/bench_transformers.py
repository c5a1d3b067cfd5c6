"""`tokenspeed bench transformers MODEL`: this engine beside the `generate` of the transformers package."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from tokenspeed.cli.bench_turns import Side, compare, described, hold_to, print_rows, turn_options
from tokenspeed.cli.options import EngineCommand, engine_options
from tokenspeed.cli.output import print_json, print_rich
from tokenspeed.config import MACHINE, MODEL, NUMERICS, EngineConfig
from tokenspeed.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tokenspeed.cli.bench_engine import Timing


@click.command(cls=EngineCommand)
@engine_options(MODEL, NUMERICS, MACHINE)
@turn_options(batches=(1, 16, 64), input_len=128, output_len=17, prefill_len=512, rounds=3)
def transformers(config: EngineConfig, at_least: float | None, as_json: bool, **work: Any) -> None:
    """Measure this engine's speed divided by that of transformers, the two taking turns in one process.

    Both hold the weights in the same dtype, compute on the same threads and continue random prompts greedily.
    transformers runs `generate` with its default attention and its default cache.
    """
    from tokenspeed.cli.bench_engine import Workload
    from tokenspeed.cli.progress import loading
    from tokenspeed.engine.kv_cache import pages_for
    from tokenspeed.startup import launch, prepare

    seqs = max(work["batches"])
    pages = max(pages_for(work["prefill_len"] + 1), seqs * pages_for(work["input_len"] + work["output_len"]))
    prepared = prepare(replace(config, max_num_seqs=seqs, num_kv_pages=pages + 1))
    plan = prepared.plan
    with loading() as progress:
        engine = Workload(launch(prepared, progress))
    sides: dict[str, Side] = {
        "transformers": Generate(prepared.checkpoint.folder, prepared.checkpoint.dtype),
        "tokenspeed": engine,
    }
    rows = compare(sides, **work)
    if as_json:
        print_json(
            {"model": config.model, "numerics": config.numerics, **described(plan.machine), **work, "rows": rows}
        )
    else:
        print_rich(
            f"{plan.model} ({plan.profile.architecture}, {plan.dtype}), {config.numerics}, on {plan.machine.describe()}"
        )
        print_rows(rows, sides)
    hold_to(rows, at_least)


class Generate:
    """transformers' `generate` on the checkpoint in `folder`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        try:
            import transformers
        except ModuleNotFoundError as error:
            raise ConfigError("the transformers package is not installed: pip install 'transformers>=5'") from error
        transformers.utils.logging.disable_progress_bar()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=dtype, local_files_only=True).eval()
        self._rng = random.Random(0)

    def run(self, batch: int, input_len: int, output_len: int) -> Timing:
        """Greedily continue `batch` random prompts of `input_len` tokens by exactly `output_len` tokens."""
        import torch

        from tokenspeed.cli.bench_engine import FIRST_ORDINARY_ID, Timing

        vocab_size = self._model.config.vocab_size
        first = min(FIRST_ORDINARY_ID, vocab_size - 1)
        prompts = torch.tensor(
            [[self._rng.randrange(first, vocab_size) for _ in range(input_len)] for _ in range(batch)]
        )
        timing = Timing()
        started = time.perf_counter()

        def stamp(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """Called after each token: notes when the first one was there, and stops nothing."""
            del scores
            timing.first_tokens.setdefault("batch", time.perf_counter() - started)
            return torch.zeros(len(ids), dtype=torch.bool)

        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
            stopping_criteria=[stamp],
        )
        timing.total = time.perf_counter() - started
        return timing
