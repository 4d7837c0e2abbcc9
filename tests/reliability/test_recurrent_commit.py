"""Replay's commit against the recurrence one token at a time: states, convolution windows, and the
checkpoints of boundaries that a step crosses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sglang_dflash.drafting.recurrent.replay import RecurrentLayers
from sglang_dflash.serving.hybrid.rollback import Replay
from sglang_dflash.serving.step import batch as our_batch
from sglang_dflash.serving.step.batch import checkpoints_due
from tests.drafting.test_recurrent_fold import (
    BLOCK,
    CHANNELS,
    DEPTH,
    KEY_DIM,
    VALUE_DIM,
    VALUE_HEADS,
    WIDTH,
    one_token,
    random_layers,
)
from tests.serving.batches import batch_of
from tests.serving.recurrent_target import runner_of

GRID, POOL = 8, 12
# Committed tokens before the step, and tokens that it commits: boundaries are crossed at the end,
# in the middle and at the start of what is accepted, reached, and not crossed.
SEQ_LENS = [6, 3, 14, 7, 16]
LENGTHS = [5, 5, 3, 1, 4]
# Tokens of the block up to the boundary; 0 for none.
TO_BOUNDARY = [2, 5, 2, 1, 0]


class Target:
    """A runner whose pool holds a recorded verify forward of every request."""

    def __init__(self, layers: RecurrentLayers) -> None:
        count = len(SEQ_LENS)
        self.layers = layers
        self.states = torch.randn(DEPTH, POOL, VALUE_HEADS, VALUE_DIM, KEY_DIM)
        self.conv = torch.randn(DEPTH, POOL, CHANNELS, WIDTH - 1)
        self.slots = torch.tensor([4, 2, 9, 7, 5], dtype=torch.int32)
        self.before = self.conv[:, self.slots.long()].clone()
        self.inputs = torch.randn(DEPTH, count, BLOCK, CHANNELS)
        self.gates = torch.randn(2, DEPTH, count, BLOCK, VALUE_HEADS)
        history = torch.cat((self.before, self.inputs.transpose(2, 3)), 3)
        windows = history.unfold(3, WIDTH - 1, 1)[:, :, :, 1:].permute(0, 1, 3, 2, 4)
        recording = {"windows": self.before, "gates": self.gates}
        self.runner = runner_of(recording, self.conv, self.states, windows, self.slots)

    def after(self, states: Tensor, row: int, tokens: int) -> tuple[Tensor, Tensor]:
        """State and window of a request after that many tokens of its block, layer by layer."""
        state = states[:, int(self.slots[row])].clone()
        window = self.before[:, row].clone()
        for layer in range(DEPTH):
            for t in range(tokens):
                a, b = self.gates[:, layer, row, t]
                x = self.inputs[layer, row, t]
                one_token(self.layers, layer, window[layer], x, a, b, state[layer])
        return state, window


def commit(target: Target, tracked: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(target.runner)
    monkeypatch.setattr(replay, "layers", lambda: target.layers)
    monkeypatch.setattr(our_batch, "mamba_track_grid", lambda _page: GRID)
    batch = batch_of(
        mamba_track_indices=None if tracked is None else torch.tensor(tracked),
        tree_cache=SimpleNamespace(page_size=1),
    )
    lengths = torch.tensor(LENGTHS)
    replay.commit(lengths, checkpoints_due(batch, torch.tensor(SEQ_LENS), lengths))


@pytest.mark.parametrize("tracked", [[1, 3, 6, 8, 10], None], ids=["checkpoints", "none"])
def test_a_commit_is_that_many_single_steps(
    tracked: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(random_layers(bias=True))
    states, conv = target.states.clone(), target.conv.clone()
    commit(target, tracked, monkeypatch)
    written = set()
    for row, slot in enumerate(target.slots.tolist()):
        places = [(slot, LENGTHS[row])]
        if tracked is not None and TO_BOUNDARY[row]:
            places.append((tracked[row], TO_BOUNDARY[row]))
        for place, tokens in places:
            state, window = target.after(states, row, tokens)
            torch.testing.assert_close(target.states[:, place], state, atol=3e-5, rtol=3e-5)
            assert torch.equal(target.conv[:, place], window)
            written.add(place)
    untouched = [slot for slot in range(POOL) if slot not in written]
    assert torch.equal(target.states[:, untouched], states[:, untouched])
    assert torch.equal(target.conv[:, untouched], conv[:, untouched])
