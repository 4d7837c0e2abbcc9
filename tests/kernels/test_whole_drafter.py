"""The whole drafter with Triton's operations and attention against torch's: the same drafted
tokens, and hidden states within a tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash_kernels.draft_attention import TritonAttention
from dflash_kernels.draft_ops import TritonOps
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerGroup
from sglang_dflash.drafting.attention.backend import AttentionSizes, DraftAttention
from sglang_dflash.drafting.attention.capabilities import AttentionLoad
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import BlockNoise, SampledBlocks
from sglang_dflash.drafting.options import Options
from tests.conftest import kv_groups, random_model, raw_config, with_own
from tests.kernels.support import DEVICE

# float32, through three layers: another order of sums.
TOLERANCE = 5e-5
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 6,
}
DFLASH2 = with_own(selector_rank=8, selector_top_k=4, conv_kernel_size=3, conv_group_size=8)
CASES: dict[str, tuple[dict[str, Any], int | None, int]] = {
    "full": ({}, None, 0),
    "causal": ({"is_causal": True}, None, 0),
    "sliding": (SLIDING, None, 0),
    "sliding-but-not-causal": ({**SLIDING, "is_causal": False}, None, 0),
    "window": ({}, 7, 0),
    "sliding-under-a-window": (SLIDING, 5, 0),
    "one-kv-head-bias-and-sinks": (
        {"num_key_value_heads": 1, "attention_bias": True, "is_causal": True}, 7, 2,
    ),
    "dflash2": ({"attention_bias": True, "num_hidden_layers": 1, **DFLASH2}, 7, 0),
}  # fmt: skip
WIDTH, ROWS = 48, 5


class Side:
    """A drafter, and the hidden states of its last proposal."""

    def __init__(self, raw: dict[str, Any], state: dict[str, Tensor], triton: bool, of: Options):
        ops = TritonOps() if triton else None
        self.model = DraftModel(DraftConfig.from_dict(raw), ops=ops).to(DEVICE)
        self.model.load_state_dict(state)
        self.model.freeze()
        config, options = self.model.config, of.resolve(self.model.config)

        def attention(layer_group: LayerGroup) -> DraftAttention:
            if not triton:
                return TorchAttention(layer_group.attentions, options.draft_block)
            load = AttentionLoad(config, options.draft_block, ROWS, WIDTH, processors=64)
            attended = layer_group.attentions
            return TritonAttention(AttentionSizes(load, torch.device(DEVICE), attended))

        # Too few entries for all, so that some tokens are lost.
        groups = kv_groups(self.model, options, ROWS * WIDTH, 60, attention=attention)
        embed = torch.randn(64, 32, generator=torch.Generator().manual_seed(5)).to(DEVICE)
        self.hidden = torch.empty(0)

        def logits(hidden: Tensor) -> Tensor:
            self.hidden = hidden
            return hidden @ embed.T

        head = TargetHead(lambda ids: embed[ids], logits)
        self.drafter = Drafter(self.model, head, groups, options)


# What the others cover in part; a case takes the interpreter eight seconds.
LONG = ("sliding", "sliding-but-not-causal", "window", "full", "causal")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.long] if name in LONG else [])
        for name, case in CASES.items()
    ],
)
def test_triton_and_torch_draft_the_same(case: tuple[dict[str, Any], int | None, int]) -> None:
    """Over steps of different batches: absorb with rejected tokens, then propose."""
    changes, window, sinks = case
    raw = raw_config(**changes)
    state = random_model(raw).state_dict()
    options = Options(window=window, sinks=sinks)
    sides = [Side(raw, state, triton, options) for triton in (False, True)]
    width = sides[0].model.config.target_hidden_width
    slots = torch.randperm(ROWS * WIDTH, device=DEVICE).int().view(ROWS, WIDTH)
    lengths, differ = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE), False
    with torch.inference_mode():
        for batch in ([0, 1, 2], [3], [4, 1, 0, 2], [0, 3], [2]):
            rows = torch.tensor(batch, device=DEVICE)
            new = torch.randint(1, 9, (len(batch),)).to(DEVICE)
            steps = torch.arange(10, device=DEVICE)
            positions = (lengths[rows][:, None] + steps).flatten()
            committed = (steps < new[:, None]).flatten()
            at = slots[rows[:, None], positions.view(len(batch), -1)].long().flatten()
            hidden = torch.randn(len(committed), width, device=DEVICE)
            lengths[rows] += new
            bonus = torch.randint(0, 63, (len(batch),)).to(DEVICE)
            known = RequestSlots(slots, rows, lengths[rows], int(lengths[rows].max()))
            # By both rules in every other step; a request of each batch is greedy.
            noise = None
            if len(batch) != 1:
                seeds = torch.randint(0, 2**62, rows.shape).to(DEVICE)
                noise = BlockNoise(seeds, 8.0 * torch.arange(len(rows)).to(DEVICE), lengths[rows])
            blocks = []
            for side in sides:
                side.drafter.absorb(hidden, positions, at, committed)
                blocks.append(side.drafter.propose(bonus, known, noise))
            if isinstance(blocks[0], SampledBlocks):
                likeliest, coupled = blocks[0].tokens
                assert torch.equal(likeliest[0], coupled[0])
                differ |= not torch.equal(likeliest, coupled)
            torch.testing.assert_close(
                sides[1].hidden, sides[0].hidden, atol=TOLERANCE, rtol=TOLERANCE
            )
            torch.testing.assert_close(*blocks, atol=TOLERANCE, rtol=TOLERANCE)
            for pair in zip(*(side.drafter.groups for side in sides), strict=True):
                stored = [group.cache.kv[: group.cache.num_entries] for group in pair]
                torch.testing.assert_close(*stored, atol=1e-5, rtol=1e-5)
    assert differ


def test_a_bias_without_a_residual_is_refused() -> None:
    with pytest.raises(ValueError, match="bias: without a residual"):
        TritonOps().add_rms_norm(torch.ones(1, 4), None, torch.ones(4), 1e-6, torch.ones(4))
