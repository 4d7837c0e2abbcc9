"""Bytes that a draft's head reads in a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoint.target_fields import TARGET
from tests.conftest import raw_config, with_own
from tests.tools.inspect.pairs import found_of

HEADS: dict[str, tuple[dict[str, Any], int, int]] = {
    "v1": ({}, 0, 0),
    "selector": (
        {"selector_rank": 8, "selector_top_k": 5},
        2 * 8 * 32,
        # Three drafts, each with the row of the token before and those of the candidates.
        2 * 3 * 6 * 8,
    ),
    "convolution": (
        {"conv_kernel_size": 3, "conv_group_size": 8},
        # Two in each layer, on input and output of a sublayer, with four groups.
        2 * 3 * 2 * 2 * 3 * (32 + 4 * 32),
        0,
    ),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_and_what_it_reads(kind: str) -> None:
    own, once, per_request = HEADS[kind]
    found = found_of(TARGET, raw_config(**with_own(**own)))
    assert found["worker"] == "sglang-dflash"
    shown = (found["draft_head_bytes"], found["draft_head_bytes_per_request"])
    assert shown == (once, per_request)
