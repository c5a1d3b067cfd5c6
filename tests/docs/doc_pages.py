"""The project's Markdown pages, taken apart for the tests in this folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("tokenspeed-*/README.md"),
        *ROOT.glob("tokenspeed-*/src/**/README.md"),
        *ROOT.glob("tests/README.md"),
        *ROOT.glob("examples/**/README.md"),
    }
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line of the page on which it begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Every fenced block of all pages in one of `languages`."""
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for page, text in ((page, page.read_text()) for page in PAGES)
        for match in _FENCE.finditer(text)
        if match[1] in languages
    ]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def shell_commands(block: Block) -> Iterator[str]:
    """The single commands of a shell block: continuations joined, `&&` and pipes split, comments dropped."""
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|(?<!\|)\|(?!\|)|;", line.split(" #")[0]):
            if part.strip():
                yield part.strip()
