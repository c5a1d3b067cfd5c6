"""The pages for plugin authors say what the program does."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from doc_pages import ROOT, blocks
from tokenspeed import __version__, hookspecs
from tokenspeed.cli.plugin import compatible_versions
from tokenspeed.kernels.registry import spec_faults
from tokenspeed.testing.names import CHECKS, KIT_VERSION

PAGES = ROOT / "docs" / "plugins"


def mistakes() -> list[tuple[str, str]]:
    """(source, message) of each wrong example: a Python block that makes `wrong`, and the text block that follows."""
    shown = [block for block in blocks("python", "text") if block.page.name == "traits.md"]
    return [(a.text, b.text.strip()) for a, b in pairwise(shown) if "wrong = " in a.text]


@pytest.mark.parametrize(("source", "message"), mistakes())
def test_a_mistake_gives_the_message_that_the_page_shows(source: str, message: str) -> None:
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    assert message in spec_faults(namespace["wrong"])


def test_mistakes_are_found() -> None:
    assert len(mistakes()) >= 6


def test_every_hook_is_described() -> None:
    text = (PAGES / "hooks.md").read_text()
    hooks = {name for name in vars(hookspecs) if name.startswith("tokenspeed_")}
    assert set(re.findall(r"^\| `(tokenspeed_\w+)`", text, re.MULTILINE)) == hooks


def test_every_check_catches_something() -> None:
    rows = re.findall(r"^\| .* \| (`[^|]+`) \|$", (PAGES / "numerics.md").read_text(), re.MULTILINE)
    assert {check for row in rows for check in re.findall(r"`(\w+)`", row)} == set(CHECKS)


def test_versions_are_those_of_the_program() -> None:
    text = (PAGES / "versions.md").read_text()
    assert f"TOKENSPEED_API = {hookspecs.API_VERSION}" in text
    assert "tokenspeed>={},<{}".format(*compatible_versions(__version__)) in text
    assert f"| the conformance kit | {KIT_VERSION} |" in text


def test_kinds_of_problems_exist() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tokenspeed-core/src").glob("**/*.py"))
    kinds = re.findall(r"`\[([a-z-]+)\]`", (PAGES / "debugging.md").read_text())
    assert kinds
    assert not [kind for kind in kinds if f'"{kind}"' not in sources]
