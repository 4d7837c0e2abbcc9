"""Prompt tokens that are projected and written, on a made-up batch."""

from __future__ import annotations

import pytest

from sglang_dflash.drafting.options import Options
from sglang_dflash.serving.step.prefill import PromptTokens
from tests.conftest import kv_groups, random_model, raw_config

MIXED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
}
Written = list[list[tuple[int, int]]]


def written(
    tokens: PromptTokens, window: int | None = 6, sinks: int = 2, mixed: bool = False
) -> tuple[int, Written]:
    """Return the number of projected tokens, and each group's written rows and positions."""
    model = random_model(raw_config(**MIXED) if mixed else raw_config())
    options = Options(window=window, sinks=sinks).resolve(model.config)
    kept, parts = tokens.to_write(kv_groups(model, options, 60, 50))
    rows, positions = tokens.batch_rows[kept], tokens.positions[kept]
    pairs = [
        list(zip(rows[some].tolist(), positions[some].tolist(), strict=True)) for some in parts
    ]
    return len(rows), pairs


def test_only_what_a_draft_can_see_is_projected() -> None:
    """Two requests of 12 and 5 tokens; of the first 3 are cached, its sinks among them."""
    _, (pairs,) = written(PromptTokens.of([3, 0], [12, 5], [12, 5]))
    expected = [(0, p) for p in range(6, 12)] + [(1, p) for p in range(5)]
    assert sorted(pairs) == expected
    # A chunk in the middle of a long prompt has left the window when drafting begins.
    chunk = PromptTokens.of([4], [8], [40])
    assert written(chunk) == (0, [[]])
    assert written(chunk, window=None, sinks=0) == (4, [[(0, p) for p in range(4, 8)]])


def test_if_not_all_fit_each_request_keeps_its_newest() -> None:
    _, (pairs,) = written(PromptTokens.of([8, 0], [12, 3], [12, 3]))
    assert pairs == [(0, 8), (0, 9), (1, 0), (0, 10), (1, 1), (0, 11), (1, 2)]


@pytest.mark.parametrize("window", [None, 6])
def test_each_group_writes_what_its_layers_see(window: int | None) -> None:
    """Layers that slide see the last 3 tokens; a full one all, or what a window leaves."""
    tokens = PromptTokens.of([0, 0], [9, 2], [9, 2])
    projected, (sliding, full) = written(tokens, window, 0, mixed=True)
    assert sliding == [(0, 6), (0, 7), (1, 0), (0, 8), (1, 1)]
    everything = [(0, p) for p in range(9)] + [(1, p) for p in range(2)]
    assert sorted(full) == (everything if window is None else everything[3:])
    assert projected == len(full)
