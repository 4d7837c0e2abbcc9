"""The draft that is published for a target."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from sglang_dflash.checkpoint.origin import published_draft
from sglang_dflash.checkpoint.published import published, shipped
from sglang_dflash.common.errors import ConfigError

DRAFT = "z-lab/Qwen3.8-27B-DFlash2"


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3.8-27B", "qwen/qwen3.8-27b", "RadixArk/Qwen3.8-27B-NVFP4",
        "Qwen/Qwen3.8-27B-FP8", "someone/Qwen3.8-27B-GPTQ-Int4", "someone/Qwen3.8-27B-AWQ-4bit",
        "someone/Qwen3.8-27B-w4a16", "someone/Qwen3.8-27B-FP8-dynamic", "/models/Qwen3.8-27B",
        "/models/Qwen3.8-27B-NVFP4/",
    ],
)  # fmt: skip
def test_a_model_and_its_quantizations_have_its_draft(target: str) -> None:
    assert published_draft(target) == DRAFT


@pytest.mark.parametrize(
    "target",
    ["Qwen/Qwen3.8-27B-Base", "Qwen/Qwen3.8", "someone/my-Qwen3.8-27B", "gpt2", "/models/", "FP8"],
)
def test_another_model_has_none_and_the_message_lists_those_that_have(target: str) -> None:
    with pytest.raises(
        ConfigError, match=r"no draft is known that is published.*Qwen/Qwen3\.8-27B"
    ):
        published_draft(target)


@pytest.mark.parametrize(
    "card",
    [
        "---\nbase_model: Qwen/Qwen3.8-27B\n---\nA fine-tune.",
        "---\nlicense: mit\nbase_model:\n- someone/unknown\n- Qwen/Qwen3.8-27B-FP8\n---",
        "---\nbase_model: [\n  'Qwen/Qwen3.8-27B' # not Qwen/Qwen3.6-27B\n]\ntags: [a/b]\n---",
    ],
)
def test_a_fine_tune_has_that_of_its_base(card: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text(card)
    assert published_draft(str(tmp_path)) == DRAFT


def test_its_own_name_comes_before_its_base(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3.8-27B-FP8"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\nbase_model: Qwen/Qwen3.6-27B\n---")
    assert published_draft(str(folder)) == DRAFT


def test_a_config_may_name_the_base(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "Qwen/Qwen3.8-27B"}))
    assert published_draft(str(tmp_path)) == DRAFT


@pytest.mark.parametrize(
    "card", ["no front matter", "---\n: [\n---", "---\n- a list\n---", "---\nbase_model: 3\n---"]
)
def test_a_card_that_says_nothing_decides_nothing(card: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(ConfigError, match="no draft is known"):
        published_draft(str(tmp_path))


def test_a_draft_without_a_whole_config_is_never_chosen() -> None:
    others = published()["others"]
    assert others and not others.keys() & shipped("draft").keys()
    for facts in others.values():
        with contextlib.suppress(ConfigError):
            chosen = published_draft(facts["target"])
            assert chosen.startswith("z-lab/") and chosen in shipped("draft")
