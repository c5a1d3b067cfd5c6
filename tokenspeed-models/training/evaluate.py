"""What the embedded model can do: its exact solve rate on all 8,100 two-digit additions, and some samples."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from corpus import ALL_ADDITIONS, END_OF_TEXT, addition_prompt

_ROWS = 1350


@torch.inference_mode()
def solve_rates(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> tuple[float, float]:
    """(greedy, sampled at temperature 1): the share of all two-digit additions that the model answers rightly.

    Both are exact, by teacher forcing: greedy is right when each token of the answer is the most probable one, and the
    sampled rate is the mean probability of the whole answer with its end-of-text token.
    """
    greedy = sampled = 0.0
    by_length: dict[int, list[list[int]]] = {}
    for a, b in ALL_ADDITIONS:
        ids = tokenizer.encode(f"{addition_prompt(a, b)}{a + b}{END_OF_TEXT}").ids
        by_length.setdefault(len(ids), []).append(ids)
    prompt = len(tokenizer.encode(addition_prompt(10, 10)).ids)
    for rows in by_length.values():
        for start in range(0, len(rows), _ROWS):
            batch = torch.tensor(rows[start : start + _ROWS])
            logits = model(input_ids=batch[:, :-1]).logits[:, prompt - 1 :].float()
            answer = batch[:, prompt:]
            greedy += (logits.argmax(-1) == answer).all(-1).sum().item()
            logprobs = functional.log_softmax(logits, -1).gather(-1, answer[..., None])[..., 0]
            sampled += logprobs.sum(-1).exp().sum().item()
    return greedy / len(ALL_ADDITIONS), sampled / len(ALL_ADDITIONS)


@torch.inference_mode()
def continuation(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str, *, temperature: float, seed: int) -> str:
    """The text that follows `prompt`, up to an end token or 64 tokens; temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    start = len(ids)
    ends = set(model.generation_config.eos_token_id)
    while len(ids) < start + 64:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token in ends:
            break
        ids.append(token)
    return tokenizer.decode(ids[start:])
