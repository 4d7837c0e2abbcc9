"""Rotary frequencies against Transformers' own, for every scaling that published drafts use."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_dflash.config import DraftConfig
from sglang_dflash.core.rope import Rotary, inverse_frequencies
from tests.conftest import raw_config

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN,
    "yarn-named-by-type": {**{k: v for k, v in YARN.items() if k != "rope_type"}, "type": "yarn"},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_transformers(name: str) -> None:
    scaling = SCALINGS[name]
    config = DraftConfig.from_dict(raw_config(rope_scaling=scaling, rope_theta=50000.0))
    ours, factor = inverse_frequencies(config.rope, 64, 4096)
    parameters = {"rope_theta": 50000.0, **scaling, "rope_type": scaling.get("rope_type", scaling.get("type"))}
    theirs = Qwen3Config(head_dim=64, max_position_embeddings=4096, rope_parameters=parameters)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, torch.device("cpu"))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_positions_have_no_end() -> None:
    """There is no table: a position far past the draft's max_position_embeddings is as good as any."""
    rotary = Rotary(DraftConfig.from_dict(raw_config()).rope, 16, 64)
    cos, sin = rotary.cos_sin(torch.tensor([5, 1_000_000]), torch.float32)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
    exact = (1_000_000.0 * rotary.frequencies.double()).cos()
    # float32 angles of 1e6 radians are rounded to 1/16: the slow half of the frequencies is unaffected.
    torch.testing.assert_close(cos[1, 0, 4:8].double(), exact[4:], atol=1e-2, rtol=0)
