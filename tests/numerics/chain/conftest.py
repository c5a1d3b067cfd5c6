"""Labs over small random checkpoints, and replies as tensors of bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.config_sources import load_config
from tokenspeed.verify.items import Item, Outcome, make_item, make_items
from tokenspeed.verify.lab import Lab
from tokenspeed.verify.script import Run, Script

FAMILIES = {
    "Qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": False},
}


@pytest.fixture(scope="session")
def checkpoints(make_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """`checkpoints("Qwen3")`: a random bf16 checkpoint."""
    return lambda family: make_checkpoint(family, dtype=torch.bfloat16, **FAMILIES[family])


@pytest.fixture(scope="session")
def labs(checkpoints: Callable[[str], Path]) -> Callable[[str], Lab]:
    """`labs("Qwen3")`: that model under rl-bitwise, loaded once."""
    made: dict[str, Lab] = {}

    def lab(family: str) -> Lab:
        if family not in made:
            made[family] = Lab(load_config({"model": str(checkpoints(family)), "numerics": "rl-bitwise"}, environ={}))
        return made[family]

    return lab


@pytest.fixture(params=list(FAMILIES))
def lab(request: pytest.FixtureRequest, labs: Callable[[str], Lab]) -> Lab:
    """Each family in turn."""
    return labs(request.param)


@pytest.fixture
def qwen3(labs: Callable[[str], Lab]) -> Lab:
    """One family, where the link does not touch the model."""
    return labs("Qwen3")


@pytest.fixture
def items(lab: Lab) -> list[Item]:
    """Sixteen ragged prompts under every way of sampling."""
    return make_items(16, vocab_size=lab.vocab_size, longest=400, output_tokens=12)


def bits(outcome: Outcome) -> torch.Tensor:
    """Token ids, logprob bits and prompt logprob bits of a reply, int64."""
    return torch.tensor([*outcome.token_ids, *outcome.bits, *outcome.prompt_bits], dtype=torch.int64)


class Same:
    """`same(lab, script)` runs it and asserts that every compared start equals the same request alone."""

    def __call__(self, lab: Lab, script: Script) -> Run:
        run = lab.run(script)
        compared = [
            (start.item, outcome) for start, outcome in zip(script.starts, run.outcomes, strict=True) if start.compared
        ]
        assert compared
        for item, outcome in compared:
            assert torch.equal(bits(outcome), bits(lab.alone(item))), item.name
            assert outcome.finish_reason == lab.alone(item).finish_reason
        return run

    def replies(self, first: Sequence[Outcome], second: Sequence[Outcome]) -> None:
        """Assert that two lists of replies are equal bit for bit."""
        assert len(first) == len(second) > 0
        for one, other in zip(first, second, strict=True):
            assert torch.equal(bits(one), bits(other))


@pytest.fixture(scope="session")
def same() -> Same:
    """The comparison."""
    return Same()


@pytest.fixture(scope="session")
def item_of() -> Callable[..., Item]:
    """`item_of(lab, length, seed, output_tokens, **params)`: a random prompt of that length."""

    def make(lab: Lab, length: int, seed: int, output_tokens: int = 10, **params: Any) -> Item:
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(lab.vocab_size, (length,), generator=generator).tolist()
        return make_item(f"{length}/{seed}", prompt, seed, output_tokens, **params)

    return make


@pytest.fixture(scope="session")
def llm_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """`llm_folder(checkpoint)`: the same checkpoint with a tokenizer of one character for each id."""
    import shutil

    from tokenizers import Tokenizer, models

    def make(source: Path) -> Path:
        folder = tmp_path_factory.mktemp("with-tokenizer") / "model"
        shutil.copytree(source, folder)
        vocabulary = {chr(0x100 + i): i for i in range(320)}
        Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0x100))).save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture(scope="module")
def llm(checkpoints: Callable[[str], Path], llm_folder: Callable[[Path], Path]) -> Iterator[Any]:
    """The Python API over the random Qwen3."""
    from tokenspeed import LLM

    folder = llm_folder(checkpoints("Qwen3"))
    with LLM(folder, numerics="rl-bitwise", max_model_len=256, num_kv_pages=512, threads=1) as running:
        yield running
