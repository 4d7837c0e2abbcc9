"""The tables of the docs that repeat the code are written by `launch/docs_tables.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import docs_tables
from sglang_dflash.common.markdown import plain


def test_the_pages_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs_tables.main(["--check"]) == 0, capsys.readouterr().err
    marked = [found[2] for page in docs_tables.pages() for found in docs_tables.marked(page)]
    assert sorted(marked) == sorted(docs_tables.TABLES)


def test_an_old_table_is_found_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs_tables, "DOCS", tmp_path)
    rows = [("`a`", "x | y"), ("`b`", "")]
    table = docs_tables.table(("key", "meaning"), rows)
    assert table == "| key | meaning |\n|---|---|\n| `a` | x \\| y |\n| `b` | |\n"
    monkeypatch.setattr(docs_tables, "TABLES", {"keys": lambda: table})
    page, prose = tmp_path / "page.md", tmp_path / "prose.md"
    prose.write_text("| key |\n")
    page.write_text(f"Before.\n\n<!-- generated: keys -->\n\n{table}\n<!-- end -->\n\nAfter.\n")
    current = page.read_text()
    assert docs_tables.main(["--check"]) == 0
    for old in (current.replace("`b`", "`c`"), current.replace("| `a` | x \\| y |\n", "")):
        page.write_text(old)
        assert docs_tables.main(["--check"]) == 1 and page.read_text() == old
        assert capsys.readouterr().err == "page.md is not current: python launch/docs_tables.py\n"
        assert docs_tables.main([]) == 0 and page.read_text() == current
    assert prose.read_text() == "| key |\n"


def test_a_terminal_gets_the_text_without_marks() -> None:
    text = "`on` looks [here](a.md#b) and there ([more](c.md)); `off` does not"
    assert plain(text) == "on looks here and there; off does not"
