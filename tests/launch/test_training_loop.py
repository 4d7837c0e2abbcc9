"""The training loop: what an interrupted run resumes."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from launch.draft_training import loop


def run(work: Path) -> tuple[torch.nn.Module, loop.TrainingRun]:
    """A small network, and its run."""
    work.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)

    def loss_of(rng: random.Random) -> tuple[Tensor, Tensor]:
        x = torch.tensor([[rng.random() for _ in range(3)]])
        return (model(x) - x).square().sum(), torch.ones(())

    return model, loop.TrainingRun("tiny", model, loss_of, lr=0.01, work=work)


def test_a_cut_run_ends_as_an_uncut_one(tmp_path: Path) -> None:
    whole, of_whole = run(tmp_path / "whole")
    of_whole.train(loop.TrainingLimit(8))
    # The first goes on without saving, and is lost.
    _, first = run(tmp_path / "cut")
    first.train(loop.TrainingLimit(5))
    first.save = lambda: None  # type: ignore[method-assign]
    first.train(loop.TrainingLimit(7))
    resumed, second = run(tmp_path / "cut")
    assert second.step == 5
    second.train(loop.TrainingLimit(8))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
        assert torch.equal(of_whole.average[name], second.average[name])


def test_the_average_goes_back_over_the_last_steps(tmp_path: Path) -> None:
    model, of = run(tmp_path)
    before = model.weight.detach().clone()
    of.train(loop.TrainingLimit(40))
    after = model.weight.detach()
    assert not torch.equal(before, after)
    # Closer to the end than to the beginning, and not the last weights.
    assert 0 < (of.average["weight"] - after).norm() < (of.average["weight"] - before).norm()


def test_the_learning_rate_falls_by_time() -> None:
    """Or by steps: whichever ends first."""
    length = loop.TrainingLimit(seconds=100.0)
    rates = [loop.lr_scale(500, 30, length.done(500, spent)) for spent in (0, 59, 80, 98, 200)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.05, 0.01])
    assert loop.lr_scale(2, 30, length.done(2, 0.0)) == pytest.approx(0.1)
    assert loop.TrainingLimit(1000, 100.0).done(800, 10.0) == 0.8


def test_sigterm_saves_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, of = run(tmp_path)
    loss_of = of.loss_of

    def cut(rng: random.Random) -> tuple[Tensor, Tensor]:
        if of.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return loss_of(rng)

    of.loss_of = cut
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, loop.until_sigterm(of):
        of.train(loop.TrainingLimit(100))
    assert left.value.code == 0 and "tiny: cut after 4 steps; saved" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    _, resumed = run(tmp_path)
    assert resumed.step == 4 and resumed.spent == of.spent
    for name, value in of.average.items():
        assert torch.equal(value, resumed.average[name])
