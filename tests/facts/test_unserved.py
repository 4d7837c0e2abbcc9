"""docs/limits.md tells of every setting with which SGLang's own worker serves."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.arg_groups import choices

from sglang_dflash.facts.unserved import UNSERVED, Unserved, builtin_reason
from sglang_dflash.serving.gpu.backends import ATTENTION
from tests.serving.test_start_up import NOT_OURS

LIMITS = (Path(__file__).parents[2] / "docs/limits.md").read_text().splitlines()


@pytest.mark.parametrize("row", UNSERVED, ids=lambda row: row.setting)
def test_the_docs_have_the_row(row: Unserved) -> None:
    flags = [f"`{flag}" for flag in row.flags]
    assert flags
    assert any(
        all(text in line for text in (*flags, "built-in", row.why, row.instead)) for line in LIMITS
    )


def test_every_row_is_tried() -> None:
    """In test_start_up.py, but two that have tests of their own in test_precision.py."""
    tried = {reason.split(" ")[0] for reason in NOT_OURS}
    own = {"--speculative-draft-model-quantization", "a"}
    assert {row.setting.split(" ")[0] for row in UNSERVED} == tried | own


def test_every_attention_of_sglangs_is_ours_or_in_the_table() -> None:
    class Nothing:
        def __getattr__(self, name: str) -> None:
            return None

    for name in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        reason = builtin_reason(Nothing(), name)
        assert (reason is None) == (name in ATTENTION), name
