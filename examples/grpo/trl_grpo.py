"""The same training through TRL's GRPOTrainer, with an adopted model and rollouts from `tokenspeed serve`.

    pip install trl
    python examples/grpo/trl_grpo.py --out build/grpo-trl

TRL's own server mode talks to vLLM through vLLM's client, so rollouts come in through `rollout_func` instead. TRL
computes log-probabilities with a head of its own, whose bits are its own too: the subclass below takes the model's
logits and `tokenspeed.trainer.logprobs` in its place, and counts the tokens that differ from what the server reported.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from addition import ANSWER_TOKENS, Task
from datasets import Dataset
from grpo import Mismatch
from rollouts import Engine
from trl import GRPOConfig, GRPOTrainer

from tokenspeed.loading.locate import locate_model
from tokenspeed.models.registry import ModelRegistry
from tokenspeed.plugins import load_plugins
from tokenspeed.trainer import adopt, logprobs

# fp32 on both sides: TRL steps the weights themselves, and steps this small would vanish in bf16.
SERVED = ("--numerics", "rl-bitwise", "--trainer", "transformers", "--dtype", "float32")


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with the engine's arithmetic for log-probabilities. `engine` answers; `work` holds the weights."""

    def __init__(self, engine: Engine, work: Path, **options: Any) -> None:
        self.engine = engine
        self.work = work
        self.reported: dict[tuple[int, ...], torch.Tensor] = {}
        self._served_step = 0
        super().__init__(rollout_func=self.roll_out, **options)

    def roll_out(self, prompts: list[list[int]], _trainer: Any) -> dict[str, Any]:
        """One completion for each prompt (TRL has repeated them) from the current weights."""
        step = self.state.global_step
        if step != self._served_step:
            self.engine.update(self.accelerator.unwrap_model(self.model), self.work, str(step))
            self._served_step = step
        ids = [self.processing_class(prompt)["input_ids"] for prompt in prompts]
        seeds = [(step + 1) * 100_003 + index for index in range(len(ids))]
        groups = self.engine.sample(ids, samples=1, max_tokens=ANSWER_TOKENS, seeds=seeds)
        rollouts = [rollout for (rollout,) in groups]
        self.reported = {
            (*prompt, *rollout.token_ids): torch.tensor(rollout.logprobs)
            for prompt, rollout in zip(ids, rollouts, strict=True)
        }
        return {
            "prompt_ids": ids,
            "completion_ids": [rollout.token_ids for rollout in rollouts],
            "logprobs": [rollout.logprobs for rollout in rollouts],
        }

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        logits = logits[:, -logits_to_keep - 1 : -1]
        wanted = input_ids[:, -logits_to_keep:]
        found = logprobs(logits, wanted, order="torch", temperature=self.temperature)
        self._compare(found.detach(), input_ids, attention_mask)
        with torch.no_grad():  # TRL reports it
            entropy = torch.distributions.Categorical(logits=logits.float() / self.temperature).entropy()
        return found, entropy, None

    def _compare(self, found: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
        """Count what differs between this forward and what the engine reported for the same tokens."""
        kept = attention_mask[:, -found.shape[1] :].bool()
        engine, trainer = [], []
        for row, ids in enumerate(input_ids):
            sequence = tuple(ids[attention_mask[row].bool()].tolist())
            engine.append(self.reported[sequence])
            trainer.append(found[row][kept[row]])
        mismatch = Mismatch.between(torch.cat(engine), torch.cat(trainer))
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["differing_tokens"].append(mismatch.differing_tokens)
        metrics["compared_tokens"].append(mismatch.tokens)


def reward(completion_ids: list[list[int]], answer: list[list[int]], **_: Any) -> list[float]:
    """1 for the right sum and nothing after it."""
    return [float(found == wanted) for found, wanted in zip(completion_ids, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--out", type=Path, default=Path("build/grpo-trl"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    folder = locate_model(options.model, ModelRegistry.from_plugins(load_plugins()).embedded)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    problems = Task(folder, seed=1).draw(options.prompts * options.steps)
    rows = [{"prompt": tokenizer.decode(problem.prompt), "answer": problem.answer} for problem in problems]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adopt(model)
    settings = GRPOConfig(
        output_dir=str(options.out),
        per_device_train_batch_size=options.prompts * options.samples,
        num_generations=options.samples,
        max_completion_length=ANSWER_TOKENS,
        max_steps=options.steps,
        learning_rate=options.lr,
        warmup_steps=5,
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    engine = Engine(options.model, (*SERVED, "--threads", str(options.threads)), options.out / "server.log")
    try:
        trainer = Trainer(
            engine,
            options.out,
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
        )
        trainer.train()
    finally:
        engine.close()
    history = [entry for entry in trainer.state.log_history if "differing_tokens" in entry]
    differing = sum(entry["differing_tokens"] for entry in history)
    print(
        f"reward {history[0]['reward']:.3f} -> {history[-1]['reward']:.3f} over {len(history)} steps, "
        f"{differing:g} differing tokens"
    )


if __name__ == "__main__":
    main()
