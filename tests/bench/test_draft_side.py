"""`python -m experiments draft_side`: its processes, its ratios, and that both draft alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.draft_side import steps_of
from experiments.experiments import draft_side
from experiments.experiments.draft_side import Options, Turn
from sglang_dflash.facts.embedded import demo_pair

DRAFT = str(demo_pair("dense").draft)


@pytest.mark.engine
def test_a_process_drafts_as_this_one() -> None:
    with draft_side.child(draft_side.ROOT, (2, 40, 0)) as other:
        turn = other.run(2)
    step = steps_of(DRAFT, 2, 40, 0)
    step()
    assert turn.ids == step().tolist() and len(turn.ids) == 2 and turn.step_ms > 0


def test_a_window_changes_what_is_read() -> None:
    whole, cut = (steps_of(DRAFT, 3, 200, window)() for window in (0, 16))
    assert whole.shape == cut.shape and not whole.equal(cut)


class Fake:
    def __init__(self, tree: Path, same: bool) -> None:
        ours = tree == draft_side.ROOT
        self.turn = Turn(2.0 if ours else 4.0, [[1]] if ours or same else [[2]])

    def run(self, steps: int) -> Turn:
        assert steps == 3
        return self.turn


@pytest.mark.parametrize("same", [True, False])
def test_ratios_are_of_equal_drafts(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def child(tree: Path, _: Any) -> Iterator[Fake]:
        yield Fake(tree, same)

    monkeypatch.setattr(draft_side, "child", child)
    monkeypatch.setattr(draft_side, "tree_of", Path)
    options = Options(revision="/other", rounds=2, steps=3)
    if not same:
        with pytest.raises(RuntimeError, match="1x256: the two draft other tokens"):
            draft_side.workload({}, options, lambda *_: None)
        return
    found = draft_side.report(draft_side.workload({}, options, lambda *_: None), options)
    row = found["loads"]["8x2048w256"]
    assert (row["ours_ms"], row["revision_ms"], row["ratio"]) == (2.0, 4.0, 0.5)
    assert len(list(draft_side.table(found))) == len(draft_side.LOADS)
