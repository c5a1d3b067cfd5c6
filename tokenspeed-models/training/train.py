"""Train the embedded model: `python train.py OUT` (about ten minutes), then write it as a checkpoint.

The language is learnt first, on a fixed schedule with few additions beside it, then mostly additions until the model
solves `TARGET` of them at temperature 1: reinforcement learning wants a task that is neither hopeless nor solved. Fixed
seeds; the same machine and library versions give the same weights. One thread by default: the matrices are so small
that a second one gains little, and nothing at all on a machine with other work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from build_tokenizer import save_tokenizer, train_tokenizer
from corpus import END_OF_TEXT, IM_END, Corpus
from evaluate import solve_rates
from model_card import write_model_card

SEED = 20
CONTEXT = 2048
LANGUAGE_STEPS = 1000
MOST_ADDITION_STEPS = 900
WARMUP_STEPS = 40
FINAL_RATE = 0.15  # the learning rate after the language stage, as a share of the peak
MATRIX_LEARNING_RATE = 0.02  # Muon, for the weights of the layers
OTHER_LEARNING_RATE = 3e-3  # AdamW, for embeddings and norms
LANGUAGE_MIX = (896, 96)  # tokens of text and of additions in a step, padding included
ADDITION_MIX = (384, 768)
TARGET = 0.41
IGNORED = -100  # the label that cross_entropy skips


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    """The architecture: grouped-query attention with 6 heads over 2, tied embeddings, 1.8 million weights."""
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        use_cache=True,
        use_sliding_window=False,
        dtype="bfloat16",
    )


def batches(
    document: Callable[[], tuple[str, str]], tokenizer: Tokenizer, tokens: int, shuffler: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, labels), each int64 [B, L] with B * L <= `tokens`; a batch's documents have about one length.

    A document is a part that is only read and a part that is learnt: the digits of a sum cannot be foreseen, so
    guessing them would only add noise to the gradient.
    """
    pad = tokenizer.token_to_id(END_OF_TEXT)
    while True:
        pool = [document() for _ in range(1024)]
        given = [len(item.ids) for item in tokenizer.encode_batch_fast([prompt for prompt, _ in pool])]
        encoded = tokenizer.encode_batch_fast([prompt + answer + END_OF_TEXT for prompt, answer in pool])
        rows = sorted(zip((item.ids for item in encoded), given, strict=True), key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], int]]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row[0]) > tokens and groups[-1]:
                groups.append([])
            groups[-1].append(row)
        shuffler.shuffle(groups)
        for group in groups:
            length = max(len(ids) for ids, _ in group)
            padded = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in group])
            labels = torch.tensor(
                [[IGNORED] * start + ids[start:] + [IGNORED] * (length - len(ids)) for ids, start in group]
            )
            yield padded[:, :-1], labels[:, 1:]


def learning_rate(step: int) -> float:
    """The learning rate at `step` (from 0) as a share of the peak: a short warm-up, a cosine, then constant."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / (LANGUAGE_STEPS - WARMUP_STEPS))
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def optimisers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, which learns additions from a tenth of the examples; AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(others, lr=OTHER_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model: Qwen3ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the labels that are not `IGNORED`."""
    logits = model(input_ids=inputs).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def mixture(
    corpus: Corpus, tokenizer: Tokenizer, mix: tuple[int, int], shuffler: random.Random
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Endless steps: inputs and labels of a batch of text, then of a batch of additions."""
    texts = batches(lambda: ("", corpus.document()), tokenizer, mix[0], shuffler)
    additions = batches(corpus.addition, tokenizer, mix[1], shuffler)
    while True:
        yield *next(texts), *next(additions)


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> int:
    """The language stage, then mostly additions until the target is reached; return the number of steps."""
    corpus, shuffler = Corpus(SEED), random.Random(SEED)
    language = itertools.islice(mixture(corpus, tokenizer, LANGUAGE_MIX, shuffler), LANGUAGE_STEPS)
    arithmetic = itertools.islice(mixture(corpus, tokenizer, ADDITION_MIX, shuffler), MOST_ADDITION_STEPS)
    chosen = optimisers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimiser, learning_rate) for optimiser in chosen]
    step, began = 0, time.monotonic()
    for step, (text, text_labels, addition, addition_labels) in enumerate(itertools.chain(language, arithmetic), 1):
        text_loss, addition_loss = loss_of(model, text, text_labels), loss_of(model, addition, addition_labels)
        model.zero_grad()
        torch.autograd.backward(text_loss + addition_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(chosen, schedules, strict=True):
            optimiser.step()
            schedule.step()
        if step % (100 if step <= LANGUAGE_STEPS else 10) == 0:
            greedy, sampled = solve_rates(model, tokenizer)
            print(
                f"step {step}: text loss {text_loss.item():.3f}, addition loss {addition_loss.item():.3f}, "
                f"solves {greedy:.1%} greedy and {sampled:.1%} sampled, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            if step > LANGUAGE_STEPS and sampled >= TARGET:
                return step
    raise SystemExit(f"the model does not solve {TARGET:.0%} of the additions after {step} steps")


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint with sorted keys and no library versions, so that it changes only when the model does."""
    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.token_to_id(END_OF_TEXT))
    config = model.config.to_diff_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    config.pop("transformers_version", None)
    config.pop("_name_or_path", None)
    generation = {"do_sample": True, "eos_token_id": ends, "pad_token_id": tokenizer.token_to_id(END_OF_TEXT)}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
    save_tokenizer(tokenizer, folder, CONTEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder that receives the checkpoint and its model card")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    sample = Corpus(SEED + 1)
    tokenizer = train_tokenizer(sample.document() for _ in range(20_000))
    model = Qwen3ForCausalLM(model_config(tokenizer)).float()
    steps = train(model, tokenizer)
    model = model.to(torch.bfloat16).eval()
    save(model, tokenizer, arguments.out)
    write_model_card(model, tokenizer, arguments.out, steps)


if __name__ == "__main__":
    main()
