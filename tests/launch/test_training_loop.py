"""The training loop: what an interrupted run resumes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from launch.demo_training import loop


class Cut(Exception):
    pass


def run(work: Path, steps: int, cut_at: int | None = None) -> torch.nn.Module:
    """Train a small network; an exception after `cut_at` steps cuts the run."""
    work.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)

    def loss_of(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        x = torch.tensor([[rng.random() for _ in range(3)]])
        loss = (model(x) - x).square().sum()
        return loss, {}

    def before_step(step: int) -> None:
        if step == cut_at:
            raise Cut

    loop.train("tiny", model, loss_of, steps=steps, lr=0.01, work=work, before_step=before_step)
    return model


def test_a_cut_run_ends_as_an_uncut_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY_S", 0.0)
    whole = run(tmp_path / "whole", 8)
    with pytest.raises(Cut):
        run(tmp_path / "cut", 8, cut_at=5)
    resumed = run(tmp_path / "cut", 8)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )
