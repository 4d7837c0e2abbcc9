"""The table of tests/README.md is current: pages make its promises, and its proofs exist."""

from __future__ import annotations

import re

from tests import ROOT
from tests.promises import PAGE, mistakes, page, rows


def test_the_table_is_current() -> None:
    """Run `python -m tests.promises` if it is not."""
    assert page() == PAGE.read_text()
    assert list(mistakes()) == []


def test_what_readme_adds_is_proven() -> None:
    section = (ROOT / "README.md").read_text().split("## What it adds")[1].split("\n## ")[0]
    added = re.findall(r"^- (\*\*.+?\*\*)", section, re.M)
    proven = {row.promise for _, row in rows(PAGE.read_text()) if row and row.page == "README.md"}
    assert added and not set(added) - proven
