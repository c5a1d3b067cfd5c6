"""A terminal, or a log, that is not UTF-8 gets what it can show."""

from __future__ import annotations

import io
import sys

import pytest

from tokenspeed.cli.output import console, print_table


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_card_can_be_printed_anywhere(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """The card comes as text from the engine's process, which knows nothing of this one's output."""
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console().print("╭─ tokenspeed plan ─╮", highlight=False)
        print_table(["model"], [["é"]])
        stream.flush()
        text = raw.getvalue().decode(encoding)
        monkeypatch.undo()
    assert text.splitlines()[0] == ("╭─ tokenspeed plan ─╮" if encoding == "utf-8" else "?? tokenspeed plan ??")
    assert text.splitlines()[2].strip() == ("?" if encoding == "ascii" else "é")
