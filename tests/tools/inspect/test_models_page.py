"""docs/models.md has a row for every published draft, with the numbers of its config."""

from __future__ import annotations

import contextlib
import json
import re

import pytest

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.checkpoint.published import FOLDER, published_pairs, shipped
from sglang_dflash.common.errors import ConfigError, UnsupportedDraft
from sglang_dflash.drafting.options import Options
from sglang_dflash.tools.inspect.report import inspect
from sglang_dflash.tools.inspect.serving import Serving
from tests import ROOT

DOCS = ROOT / "docs"
WHOLE, _, REST = (DOCS / "models.md").read_text().partition("## Published, without a whole config")
PART = REST.partition("\n## ")[0]


def rows_of(text: str) -> list[dict[str, str]]:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    # After the head and the line of dashes.
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


ROWS = rows_of(WHOLE)


def test_every_published_draft_is_a_row() -> None:
    published = [draft for drafts in published_pairs().values() for draft in drafts]
    assert sorted(row["draft"] for row in ROWS) == sorted(published)


def test_drafts_without_a_whole_config_are_listed_and_never_chosen() -> None:
    others = json.loads((FOLDER / "collection.json").read_text())["others"]
    listed = {row["draft"]: (row["target"], row["seen"]) for row in rows_of(PART)}
    assert listed == {name: (of["target"], of["known"]) for name, of in others.items()}
    assert not others.keys() & shipped("draft").keys()
    for of in others.values():
        with contextlib.suppress(ConfigError):
            chosen = published_draft(of["target"])
            assert chosen.startswith("z-lab/") and chosen in shipped("draft")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["draft"])
def test_a_row_shows_what_its_facts_file_decides(row: dict[str, str]) -> None:
    facts = shipped("draft")[row["draft"]]
    file = re.fullmatch(r"\[source\]\(../sglang_dflash/checkpoint/published/(.*)\)", row["facts"])
    assert file and json.loads((FOLDER / file[1]).read_text())["name"] == facts.name
    raw = facts.config
    own = raw["dflash_config"]
    assert int(row["block"]) == own.get("block_size", raw.get("block_size"))
    assert row["mask token"] == str(own.get("mask_token_id", "not seen"))
    counts = sum(int(run.split()[0]) for run in re.split(r", (?=\d)", row["draft layers"]))
    assert counts == raw["num_hidden_layers"]
    is_sliding = "sliding_attention" in raw.get("layer_types", ())
    assert ("sliding" in row["draft layers"]) == is_sliding
    serving = Serving(max_running_requests=8, kv_memory_gib=16)
    gain = inspect(shipped("target")[row["target"]], facts, Options(), serving)[
        "target_tokens_gain"
    ]
    assert row["more KV tokens"] == (f"+{100 * gain:.1f} %" if is_sliding else "none")
    if facts.unknown:
        assert row["served by"].startswith("unknown: ")
        assert all(name in row["served by"] for name in facts.unknown)
        return
    try:
        DraftConfig.from_dict(raw)
        assert row["served by"] == "sglang-dflash"
    except UnsupportedDraft as reason:
        assert row["served by"] == f"SGLang's built-in worker: {reason}"
