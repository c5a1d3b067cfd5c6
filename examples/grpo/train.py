"""GRPO on two-digit additions: a transformers model and a torch optimiser, rollouts from `tokenspeed serve`.

    python examples/grpo/train.py --out build/grpo

Every step samples from the server, computes the same tokens' log-probabilities in the trainer, counts how many of them
differ from what the server reported, updates the weights and gives them to the server. Under rl-bitwise with an adopted
trainer that count is 0 at every step; `--stock-trainer` and `--reference-engine` show how it is otherwise.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from addition import ANSWER_TOKENS, Addition, Task
from grpo import Batch, Mismatch, advantages, loss
from rollouts import Engine, Rollout

from tokenspeed.loading.locate import locate_model
from tokenspeed.models.registry import ModelRegistry
from tokenspeed.numerics.weights import digest_files
from tokenspeed.plugins import load_plugins
from tokenspeed.trainer import adopt, logprobs

BITWISE = ("--numerics", "rl-bitwise", "--trainer", "transformers")
REFERENCE = ("--plugins", "tokenspeed-reference,tokenspeed-models", "--logprob-order", "torch")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="the embedded model, or a folder")
    parser.add_argument("--out", type=Path, default=Path("build/grpo"), help="folder for the CSV, weights and the log")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=96, help="problems in a step")
    parser.add_argument("--samples", type=int, default=8, help="answers to each problem")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--warmup", type=int, default=10, help="steps over which the learning rate rises")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=1, help="of trainer and engine each; tiny gains nothing from two"
    )
    parser.add_argument("--url", help="a server that is running already, started with --numerics rl-bitwise")
    parser.add_argument("--stock-trainer", action="store_true", help="do not adopt the trainer's model")
    parser.add_argument("--reference-engine", action="store_true", help="serve with torch's kernels and no promise")
    parser.add_argument(
        "--old-logprobs",
        choices=("rollout", "recompute"),
        default="rollout",
        help="the ratio's denominator: what the engine reported, or one more forward pass of the trainer",
    )
    return parser.parse_args()


class Trainer:
    """The policy, and its optimiser on fp32 copies of the weights: steps this small would vanish in bf16."""

    def __init__(self, folder: Path, lr: float, warmup: int, *, adopted: bool) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").train()
        if adopted:
            adopt(self.model)
        self._weights = list(self.model.parameters())
        self._masters = [weight.detach().float().requires_grad_() for weight in self._weights]
        self._optimiser = torch.optim.AdamW(self._masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimiser, 1 / warmup, total_iters=warmup - 1)

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """float32[N]: the policy's log-probabilities of the batch's completion tokens."""
        output = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        return logprobs(output.logits[batch.rows, batch.columns], batch.targets, order="torch")

    def step(self, objective: torch.Tensor) -> None:
        """One optimiser step down the gradient of `objective`."""
        objective.backward()
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimiser.step()
        self._schedule.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights, strict=True):
                weight.copy_(master)


def rollouts_of(engine: Engine, problems: list[Addition], samples: int, seed: int) -> list[list[Rollout]]:
    seeds = [seed * 100_003 + index for index in range(len(problems))]
    prompts = [problem.prompt for problem in problems]
    return engine.sample(prompts, samples=samples, max_tokens=ANSWER_TOKENS, seeds=seeds)


def train_step(trainer: Trainer, problems: list[Addition], groups: list[list[Rollout]], old: str) -> dict[str, Any]:
    """Learn from one step's rollouts; the reward, and how the trainer's log-probabilities compare with the engine's."""
    pairs = [(problem, rollout) for problem, group in zip(problems, groups, strict=True) for rollout in group]
    batch = Batch.of([problem.prompt for problem, _ in pairs], [rollout.token_ids for _, rollout in pairs])
    rewards = torch.tensor([problem.reward(rollout.token_ids) for problem, rollout in pairs])
    weight = advantages(rewards.view(len(groups), -1)).flatten()[batch.rows]
    reported = torch.tensor([value for _, rollout in pairs for value in rollout.logprobs])
    before = reported
    if old == "recompute":
        with torch.no_grad():
            before = trainer.logprobs(batch)
    new = trainer.logprobs(batch)
    trainer.step(loss(new, before, weight))
    return {"reward": float(rewards.mean()), **dataclasses.asdict(Mismatch.between(reported, new.detach()))}


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with us
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    folder = locate_model(options.model, ModelRegistry.from_plugins(load_plugins()).embedded)
    trainer = Trainer(folder, options.lr, options.warmup, adopted=not options.stock_trainer)
    task = Task(folder, options.seed)
    served = REFERENCE if options.reference_engine else BITWISE
    served = (*served, "--threads", str(options.threads))
    engine = Engine(options.model, served, options.out / "server.log", options.url)
    try:
        run(trainer, engine, task, options)
    finally:
        engine.close()
    (last,) = sorted(options.out.glob(f"weights-{options.steps % 2}/*.safetensors"))
    print(f"weights after {options.steps} steps: {digest_files([last], cache=None).hex}")


def run(trainer: Trainer, engine: Engine, task: Task, options: argparse.Namespace) -> None:
    """The training: one line of the CSV, and of the output, for each step."""
    started = time.monotonic()
    version = "0"
    with (options.out / "steps.csv").open("w", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for step in range(1, options.steps + 1):
            begun = time.monotonic()
            problems = task.draw(options.prompts)
            groups = rollouts_of(engine, problems, options.samples, options.seed * 1_000 + step)
            stale = sum(rollout.weight_version != version for group in groups for rollout in group) if step > 1 else 0
            sampled = time.monotonic()
            row = {"step": step, **train_step(trainer, problems, groups, options.old_logprobs)}
            learned = time.monotonic()
            version = str(step)
            fingerprint = engine.update(trainer.model, options.out, version)
            row |= {
                "stale_rollouts": stale,
                "rollout_seconds": round(sampled - begun, 3),
                "train_seconds": round(learned - sampled, 3),
                "update_seconds": round(time.monotonic() - learned, 3),
                "fingerprint": fingerprint,
            }
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            print(
                f"step {step:3}  reward {row['reward']:.3f}  differing tokens {row['differing_tokens']} of "
                f"{row['tokens']}  max |difference| {row['max_abs_difference']:g}  "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
