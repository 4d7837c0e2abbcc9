"""Kernel launches of replay beside SGLang's verify, counted as the experiment does."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments import launches
from sglang_dflash.checkpoint.published import shipped
from sglang_dflash.checkpoint.target_config import TargetGeometry


def test_replay_launches_once_per_recurrent_layer() -> None:
    """It was five times, and three times as much for checkpoints."""
    geometry = TargetGeometry.from_dict(shipped("target")[launches.TARGET].config or {})
    with FakeTensorMode(), torch.device("cuda"):
        found = launches.count_replay(geometry, requests=2)
    names = {phase: [launch.name for launch in of] for phase, of in found.items()}
    assert names["record"].count("foreach_copy_") == geometry.recurrent_layers == 48
    assert len(names["record"]) == 48 + 3
    for phase, most in (("commit", 4), ("commit, checkpoints", 11)):
        assert len(names[phase]) <= most
        assert [name for name in names[phase] if name.endswith("_kernel")] == [
            "fold_kernel", "move_windows_kernel"
        ]  # fmt: skip
