"""Moves of recurrent states between slots."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_dflash.plugins.platform_cpu.gdn_ops import states as ours
from tests.plugins.platform_cpu.gdn_cases import BLOCK, SLOTS


def test_commit_takes_the_accepted_snapshot_and_the_crossed_boundary() -> None:
    layers = 2
    caches = SimpleNamespace(
        temporal=torch.full((layers, SLOTS, 3), -1.0),
        intermediate_ssm=torch.rand(layers, 4, BLOCK, 3),
        conv=[torch.full((layers, SLOTS, 4, 2), -1.0)],
        intermediate_conv_window=[torch.rand(layers, 4, BLOCK, 4, 2)],
    )  # fmt: skip
    slots, steps = torch.tensor([5, 0, -1], dtype=torch.int32), torch.tensor([4, 0, 2])
    boundaries, crossed = torch.tensor([1, 2, 3]), torch.tensor([-1, 3, -1])
    ours.scatter_mamba_states_after_mtp_verify(caches, slots, steps, boundaries, crossed)
    pairs = [
        (caches.temporal, caches.intermediate_ssm),
        (caches.conv[0], caches.intermediate_conv_window[0]),
    ]
    for states, snapshots in pairs:
        assert torch.equal(states[:, 5], snapshots[:, 0, 4]) and torch.equal(
            states[:, 0], snapshots[:, 1, 0]
        )
        assert (
            torch.equal(states[:, 2], snapshots[:, 1, 3]) and (states[:, [1, 3, 4, 6]] == -1).all()
        )
    ours.scatter_mamba_states_after_mtp_verify(
        caches, slots[:1], steps[:1], None, None, src_indices_raw=torch.tensor([3])
    )
    assert all(torch.equal(states[:, 5], snapshots[:, 3, 4]) for states, snapshots in pairs)


def test_states_are_tracked_at_boundaries() -> None:
    conv, ssm = torch.rand(2, SLOTS, 4, 2), torch.rand(2, SLOTS, 3)
    expected = conv.clone(), ssm.clone()
    for pool in expected:
        pool[:, 6] = pool[:, 1]
    mask = torch.tensor([False, True, True, True])
    rows = torch.tensor([0, 1, -1, 2], dtype=torch.int32), mask, torch.tensor([5, 6, 4, -1])
    one = conv[1].clone(), ssm[1].clone()
    ours.track_mamba_states_all_layers(conv, ssm, *rows, 4)
    ours.track_mamba_states_if_needed(*one, *rows, 4)
    assert all(torch.equal(x, y) for x, y in zip((conv, ssm), expected, strict=True))
    assert all(torch.equal(x, y[1]) for x, y in zip(one, expected, strict=True))
