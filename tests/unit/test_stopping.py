"""Stop strings: cut exactly, wherever the text is split, and nothing shown that could still become one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.engine.stopping import StopStrings


def reference(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The stop string that ends first, the longest of several, by trying every end."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], *, include: bool) -> tuple[str, str | None, list[str]]:
    stream, shown = StopStrings(stops, include=include), []
    for piece in pieces:
        text, stop = stream.push(piece)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop, shown
    shown.append(stream.flush())
    return "".join(shown), None, shown


@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_the_split_does_not_matter(pieces: list[str], stops: list[str], include: bool) -> None:
    text, stop, shown = run(pieces, stops, include=include)
    assert (text, stop) == reference("".join(pieces), stops, include=include)
    assert "".join(shown).startswith("".join(shown[:-1]))


def test_a_stop_string_that_straddles_tokens_is_never_shown() -> None:
    stream = StopStrings(["</answer>"], include=False)
    assert [stream.push(piece) for piece in ("42", "</", "ans", "wer", ">tail")] == [
        ("42", None),
        ("", None),
        ("", None),
        ("", None),
        ("", "</answer>"),
    ]


def test_text_that_does_not_become_a_stop_string_is_shown_after_all() -> None:
    stream = StopStrings(["\n\nUser:"], include=False)
    assert stream.push("a\n\nUs") == ("a", None)
    assert stream.push("e it") == ("\n\nUse it", None)
    assert stream.push("\n") == ("", None)
    assert stream.flush() == "\n"


@pytest.mark.parametrize(("include", "shown"), [(False, ""), (True, "a")])
def test_inactive_rules_ignore_what_ends_before_they_start(include: bool, shown: str) -> None:
    stream = StopStrings(["a"], include=include)
    assert stream.push("xa", active=False) == ("xa", None)
    assert stream.push("a", active=True) == (shown, "a")
