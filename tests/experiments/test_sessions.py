"""`python -m experiments sessions`: its figures in docs and README are those of today's code."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from experiments import sessions
from experiments.sessions import CARDS, TARGETS, Options, picture, run, table
from tests import ROOT


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    return run(Options())


def test_the_table_of_the_docs_is_current(result: dict[str, object]) -> None:
    assert "\n".join(table(result)) in (ROOT / "docs" / "inspect.md").read_text()


def test_our_worker_runs_no_fewer_than_sglangs(result: dict[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, dict) and list(rows) == list(TARGETS)
    for cards in rows.values():
        for gib in CARDS:
            counts = cards[str(gib)]
            assert counts["SGLang's worker"] <= counts["as served"] <= counts["without a draft"]
            assert counts["ours, default flags"] <= counts["as served"]


def test_the_picture_is_current_and_shows_its_figures(
    result: dict[str, object], tmp_path: Path
) -> None:
    drawn = (ROOT / "docs" / "sessions.svg").read_text()
    rows = result["rows"]
    assert isinstance(rows, dict)
    counts = rows[sessions.SHOWN][str(sessions.SHOWN_CARD)]
    assert drawn == picture(counts)
    root = ElementTree.fromstring(drawn)
    texts = [node.text for node in root.iter() if node.tag.endswith("}text")]
    assert [text for text in texts if text and text.isdigit()] == [
        str(counts[name]) for name in ("SGLang's worker", "as served", "without a draft")
    ]
    claim = (
        "**{SGLang's worker} with SGLang's DFLASH worker, {as served} with this one, "
        "{without a draft} without a draft**"
    )
    assert claim.format(**counts) in " ".join((ROOT / "README.md").read_text().split())
