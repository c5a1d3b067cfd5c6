"""The embedded model's README, written with what was measured on the model that it lies beside."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from evaluate import continuation, solve_rates

_COMPLETIONS = ("The cat", "One day", "The sky is", "The capital of Japan is", "12+34=", "68+75=")
_QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "What color is the sky?",
    "Tell me a story about a fox.",
    "What is 21+34?",
)

_TEMPLATE = Path(__file__).with_name("model_card.md.in")


def write_model_card(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path, steps: int) -> None:
    """Measure `model` (as it was saved, in bf16) and write `folder`/README.md."""
    greedy, sampled = solve_rates(model, tokenizer)
    completions = [f"- {p}**{continuation(model, tokenizer, p, temperature=1.0, seed=1)}**" for p in _COMPLETIONS]
    chats = []
    for question in _QUESTIONS:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        chats.append(f"- *{question}* {continuation(model, tokenizer, prompt, temperature=0.0, seed=0)}")
    config = model.config
    card = _TEMPLATE.read_text().format(
        weights=sum(parameter.numel() for parameter in model.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        steps=steps,
        greedy=greedy,
        sampled=sampled,
        completions="\n".join(completions),
        chats="\n".join(chats),
    )
    (folder / "README.md").write_text(card)
    print(card)
