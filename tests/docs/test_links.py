"""Every relative link of every page leads to a file, and its anchor to a heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doc_pages import PAGES, ROOT, prose


def links() -> list[tuple[Path, str]]:
    return [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", prose(page))]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as MkDocs makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize(("page", "target"), links(), ids=lambda v: v.name if isinstance(v, Path) else v)
def test_link_resolves(page: Path, target: str) -> None:
    if target.startswith(("http://", "https://")):
        return
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    assert file.exists(), f"{page.relative_to(ROOT)} links to {target}"
    if anchor:
        assert anchor in headings(file), f"{page.relative_to(ROOT)} links to {target}; headings: {headings(file)}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("**/*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation, f"{page.name} is not in mkdocs.yml"
