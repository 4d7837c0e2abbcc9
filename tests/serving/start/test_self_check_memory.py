"""The start-up check of recordings beside pools that leave little memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.kernel_traffic import StepContents
from experiments.launches import record_launches
from sglang_dflash.drafting.noise import BlockNoise
from sglang_dflash.tools.gpu_check.drafters import random_head, random_model
from sglang_dflash.tools.gpu_check.floors import config_of
from tests.alive import Alive

CUDA = torch.device("cuda")


def most_bytes(shape: str, requests: int) -> int:
    """Return the peak bytes of a comparison of that many requests' coupled drafts."""
    with FakeTensorMode(), torch.no_grad():
        config = config_of(f"z-lab/{shape}")
        model = random_model(config, CUDA, torch.bfloat16)
        head, rows = model.make_head(random_head(model)), torch.arange(requests, device=CUDA)
        hidden = model.fc.weight.new_empty(requests, config.block_size, config.hidden_size)
        ids = rows[:, None].expand(-1, config.block_size - 1)
        noise = BlockNoise(rows, rows.float(), rows)
        with record_launches(StepContents([100] * requests)), Alive() as alive:
            short = head.shortfall(hidden, rows, ids, noise)
    assert short.shape == ids.shape
    return alive.most


@pytest.mark.parametrize("shape", ["Qwen3.5-27B-DFlash", "Qwen3.8-27B-DFlash2"])
def test_a_comparison_takes_what_one_request_takes(shape: str) -> None:
    """Vocabularies of 248,320 tokens."""
    one, many = most_bytes(shape, 1), most_bytes(shape, 32)
    print(f"{shape}: {one / 2**20:.1f} MiB for 1 request, {many / 2**20:.1f} MiB for 32")
    assert one <= many < 1.1 * one
