"""How the benchmarks declare their options: whole numbers, and the sizes of the work that several of them measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import click
from click.decorators import FC


class Option(Protocol):
    """What `click.option` returns: a decorator of commands."""

    def __call__(self, command: FC, /) -> FC: ...


def count_option(flag: str, default: int, help_: str, *, least: int = 1) -> Option:
    """A whole number from `least` on."""
    return click.option(flag, type=click.IntRange(least), default=default, show_default=True, help=help_)


def counts_option(flag: str, name: str, default: Sequence[int], help_: str) -> Option:
    """Whole numbers from 1 on; those that are given take the place of all the default ones."""
    text = f"{help_}  [default: {' '.join(map(str, default))}]"
    return click.option(flag, name, type=click.IntRange(1), multiple=True, default=default, help=text)


def size_options(*, batches: Sequence[int], input_len: int, output_len: int, prefill_len: int) -> Option:
    """What is prefilled and decoded, with these defaults; the command gets it by these names."""
    return together(
        counts_option("--batch-size", "batches", batches, "May be repeated."),
        count_option("--input-len", input_len, "Prompt tokens when decoding."),
        count_option("--output-len", output_len, "New tokens of each request.", least=2),
        count_option("--prefill-len", prefill_len, "Prompt tokens to prefill."),
    )


def together(*options: Option) -> Option:
    """Several options as one decorator; help lists them in this order."""

    def add(command: FC) -> FC:
        for option in reversed(options):
            command = option(command)
        return command

    return add
