"""The architecture page and the seams page describe the code as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGES = (
    "checkpoint",
    "core",
    "plugin",
    "serving",
    "platform_cpu",
    "hf",
    "inspect_pair",
    "doctor",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_architecture_page_names_every_module(package: str) -> None:
    page = (DOCS / "architecture.md").read_text().split("## Modules")[1].split("\n## ")[0]
    (text,) = re.findall(rf"^\*\*{package}\*\*: (.*?)(?=\n\n|\Z)", page, re.M | re.S)
    folder = ROOT / "sglang_dflash" / package
    stems = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    stems |= {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    named = set(re.findall(r"`(\w+)`", text))
    assert stems <= named, f"not on the page: {sorted(stems - named)}"


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("*.md")), ROOT / "CONTRIBUTING.md"], ids=str)
def test_paths_in_the_docs_exist(page: Path) -> None:
    """`serving/seams.py` and the like, from the root or from the package."""
    text = page.read_text()
    for name in re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|sh|json|txt))(?::\w+)?`", text):
        homes = (ROOT, ROOT / "sglang_dflash", DOCS, ROOT / "sglang_dflash/core")
        planned = f"{name}`" in text.split("## Where the next capabilities go")[-1]
        assert any((home / name).exists() for home in homes) or planned or "NAME" in name, name
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / link).exists(), link


def test_the_seams_page_is_current() -> None:
    from tools.seams_page import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text()), "run python tools/seams_page.py"
