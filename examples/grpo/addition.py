"""The task: two-digit additions in the embedded model's fixed format, `12+34=46`, judged by their token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

ANSWER_TOKENS = 4
"""Three digits at most, and the end of the text."""

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Addition:
    """One problem: token ids of `12+34=` and of the one right answer, its end-of-text token included."""

    prompt: list[int]
    answer: list[int]

    def reward(self, completion: Sequence[int]) -> float:
        """1 for the right sum and nothing after it, else 0."""
        return float(list(completion) == self.answer)


class Task:
    """Problems for a model's tokenizer; the same seed gives the same ones."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._random = random.Random(seed)

    def draw(self, count: int) -> list[Addition]:
        """`count` random problems."""
        return [self._addition(self._random.randint(10, 99), self._random.randint(10, 99)) for _ in range(count)]

    def _addition(self, a: int, b: int) -> Addition:
        prompt = self._tokenizer.encode(f"{a}+{b}=").ids
        return Addition(prompt, self._tokenizer.encode(f"{a + b}{END_OF_TEXT}").ids)
