"""The reference pages say what the program does, and the distributions agree with each other."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

import generate_reference
import tokenspeed
from doc_pages import ROOT

DISTRIBUTIONS = sorted(path.parent.name for path in ROOT.glob("tokenspeed-*/pyproject.toml"))


def project(folder: str) -> dict[str, Any]:
    """The `[project]` table of a distribution."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("page", list(generate_reference.PAGES))
def test_page_is_up_to_date(page: str) -> None:
    written = (ROOT / "docs/reference" / page).read_text()
    assert written == generate_reference.render(page), "run scripts/generate_reference.py"


@pytest.mark.parametrize("name", sorted(set(tokenspeed.__all__) - {"__version__"}))
def test_public_name_is_documented_and_loads(name: str) -> None:
    assert getattr(tokenspeed, name) is not None
    assert f"`{name}`" in (ROOT / "docs/reference/python.md").read_text()


def test_there_are_four_distributions() -> None:
    assert len(DISTRIBUTIONS) == 4


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_version_is_the_same_everywhere(folder: str) -> None:
    """One version for all, with the epoch that no release of the other `tokenspeed` can satisfy."""
    assert project(folder)["version"] == tokenspeed.__version__
    assert tokenspeed.__version__.startswith("1!")
    extras = project(folder).get("optional-dependencies", {}).values()
    for requirement in [*project(folder)["dependencies"], *(item for extra in extras for item in extra)]:
        if re.match(r"tokenspeed(-[a-z-]+)?[<>=]", requirement):
            assert ">=1!" in requirement, f"{folder}: {requirement} could be another project's"


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_metadata_is_complete(folder: str) -> None:
    table = project(folder)
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.11"
    assert len((ROOT / folder / table["readme"]).read_text()) > 200
    assert "tokenspeed" in table["entry-points"]


def test_constraints_name_no_machine() -> None:
    """`constraints.txt` holds plain pins: no paths, URLs, options or local builds, and none of our own names."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines)
    assert not [line for line in lines if line.startswith("tokenspeed")]
    assert "torch==2.13.0" in lines
