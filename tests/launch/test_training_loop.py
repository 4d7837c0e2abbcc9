"""The training loop: what an interrupted run resumes."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
from demo_training import code_card, loop


class Cut(Exception):
    pass


def run(work: Path, steps: int, cut_at: int | None = None) -> tuple[torch.nn.Module, Any]:
    """Train a small network; an exception after `cut_at` steps cuts the run."""
    work.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)

    def loss_of(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        x = torch.tensor([[rng.random() for _ in range(3)]])
        loss = (model(x) - x).square().sum()
        return loss, {"acceptance": 1 + float(loss.detach())}

    def before_step(step: int) -> None:
        if step == cut_at:
            raise Cut

    loop.train("tiny", model, loss_of, steps=steps, lr=0.01, work=work, before_step=before_step)
    return model, torch.load(work / "tiny.state.pt")


def test_a_cut_run_ends_as_an_uncut_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(loop, "SHOW_EVERY", 2)
    whole, state = run(tmp_path / "whole", 8)
    with pytest.raises(Cut):
        run(tmp_path / "cut", 8, cut_at=5)
    resumed, after = run(tmp_path / "cut", 8)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )
    assert [one["step"] for one in after["history"]] == [2, 4, 6, 8]
    assert {one["planned"] for one in after["history"]} == {8}
    # After the cut, the running mean of the figures begins anew.
    assert after["history"][:2] == state["history"][:2]


def test_the_card_shows_the_history_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_card, "CURVE_STEPS", 500)
    history = [
        {"step": 500, "planned": 1000, "loss": 3.0, "acceptance": 1.5},
        {"step": 600, "planned": 1000, "loss": 2.9, "acceptance": 1.6},
        {"step": 1500, "planned": 2000, "loss": 2.0, "acceptance": 2.25},
    ]
    _, _, *rows = code_card.curve_table(history).splitlines()
    assert rows == [
        "| 500 of 1,000 | 3.00 | 1.50 |",
        "| 1,500 of 2,000 | 2.00 | 2.25 |",
    ]
