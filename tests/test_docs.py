"""Paths and links in the docs lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT

DOCS = ROOT / "docs"
OTHERS = ("README.md", "CONTRIBUTING.md", "tests/README.md")
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in OTHERS)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_paths_in_the_docs_exist(page: Path) -> None:
    """`serving/patches.py` and the like, from the root or from the package."""
    text = page.read_text()
    for name in re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|sh|json|txt))(?::\w+)?`", text):
        homes = (ROOT, ROOT / "sglang_dflash", DOCS, page.parent)
        assert any((home / name).exists() for home in homes) or "NAME" in name, name
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / link).exists(), link


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=str)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    found = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    assert not [
        f"{link}#{anchor}"
        for link, anchor in found
        if anchor not in anchors(page.parent / link if link else page)
    ]
