"""The training loop: what an interrupted run resumes."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

from launch.draft_training import loop


def run(work: Path) -> tuple[torch.nn.Module, loop.Run]:
    """A small network, and its run."""
    work.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)

    def loss_of(rng: random.Random) -> tuple[Tensor, Tensor]:
        x = torch.tensor([[rng.random() for _ in range(3)]])
        return (model(x) - x).square().sum(), torch.ones(())

    return model, loop.Run("tiny", model, loss_of, lr=0.01, work=work)


def test_a_cut_run_ends_as_an_uncut_one(tmp_path: Path) -> None:
    whole, of_whole = run(tmp_path / "whole")
    of_whole.train(loop.Length(8))
    # The first goes on without saving, and is lost.
    _, first = run(tmp_path / "cut")
    first.train(loop.Length(5))
    first.save = lambda: None  # type: ignore[method-assign]
    first.train(loop.Length(7))
    resumed, second = run(tmp_path / "cut")
    assert second.step == 5
    second.train(loop.Length(8))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
        assert torch.equal(of_whole.average[name], second.average[name])


def test_the_average_goes_back_over_the_last_steps(tmp_path: Path) -> None:
    model, of = run(tmp_path)
    before = model.weight.detach().clone()
    of.train(loop.Length(40))
    after = model.weight.detach()
    assert not torch.equal(before, after)
    # Closer to the end than to the beginning, and not the last weights.
    assert 0 < (of.average["weight"] - after).norm() < (of.average["weight"] - before).norm()
