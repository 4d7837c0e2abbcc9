"""Choice of the tokens drafted for a sampled request: at each position, the draft's likeliest token
or the coupled one (`noise.py`).

Coupling guesses more where the draft's distribution resembles the target's, and fewer where it is
flat. The drafts of both rules are known for every position that a step reached, so the better
rule is found without trying the other. A request without a seed has the coupled ones, which were
drawn from the draft's distribution.

Letters in shapes: R requests; B block positions; W positions of a step, up to B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.noise import (
    COUPLED,
    LIKELIEST,
    RULES,
    BlockNoise,
    Proposal,
    SampledBlocks,
)

# What a hit is worth one step later: a choice rests on the last few hundred steps.
DECAY = 0.995


class DraftsByRule(NamedTuple):
    """The drafts of both rules in one step.

    Attributes:
        tokens: int64 `[2, R, B]`.
        is_chosen: bool `[R]`, the requests that there is a choice for: sampled ones with a seed.
    """

    tokens: Tensor
    is_chosen: Tensor


class SampledDrafts:
    """Drafts by the better of the two rules at each block position, over all sampled requests.

    All of it is computed on the device.
    """

    def __init__(self, verify_block: int, device: torch.device) -> None:
        """`verify_block`: B, or more."""
        self._hits = torch.zeros(len(RULES), verify_block - 1, device=device)

    @property
    def couples(self) -> Tensor:
        """Bool `[B - 1]`: drafts of sampled requests that are coupled."""
        return self._hits[COUPLED] >= self._hits[LIKELIEST]

    def choose(
        self, drafted: Tensor | SampledBlocks, noise: BlockNoise | None, seeded: Tensor | None
    ) -> tuple[Tensor, DraftsByRule | None]:
        """Return the block int64 `[R, B]` chosen from what a `Proposer` returned, and the drafts
        to hand to `learn`; None if there was no choice.

        Args:
            seeded: bool `[R]`, the requests with a seed; None if no request has one.
        """
        if not isinstance(drafted, SampledBlocks):
            return drafted, None
        tokens = drafted.tokens
        if noise is None or seeded is None:
            # A copy begins where kernels have been compiled for.
            return tokens[COUPLED].clone(), None
        is_chosen = seeded & (noise.temperatures > 0)
        coupled = torch.where(
            is_chosen[:, None], self.couples[: tokens.shape[2] - 1], ~seeded[:, None]
        )
        block = tokens[LIKELIEST].clone()
        block[:, 1:] = tokens[COUPLED, :, 1:].where(coupled, block[:, 1:])
        return block, DraftsByRule(tokens, is_chosen)

    def learn(self, by_rule: DraftsByRule | None, accepted: Accepted) -> None:
        """Count which drafts were the target's tokens, where all drafts before were accepted."""
        if by_rule is None:
            return
        drafts = min(accepted.tokens.shape[1], by_rule.tokens.shape[2]) - 1
        at = torch.arange(drafts, device=accepted.lengths.device)
        reached = (at < accepted.lengths[:, None]) & by_rule.is_chosen[:, None]
        hits = (by_rule.tokens[:, :, 1 : drafts + 1] == accepted.tokens[:, :drafts]) & reached
        self._hits[:, :drafts].mul_(DECAY).add_(hits.sum(1))


def proposal_of(
    block: Tensor,
    drafted: Tensor | SampledBlocks,
    noise: BlockNoise | None,
    seeded: Tensor | None,
    looks_up: Tensor | None = None,
) -> Proposal | None:
    """Return what the drafts of a step were drawn from; None if they were not.

    Args:
        block: int64 `[R, W]`, which the step verifies.
        drafted, noise, seeded: see `SampledDrafts.choose`.
        looks_up: bool `[R]`, the requests whose drafts are looked up; None for none. It may not
            depend on the noise of this block.
    """
    if noise is None or not isinstance(drafted, SampledBlocks):
        return None
    is_drawn = noise.temperatures > 0
    for others in (seeded, looks_up):
        if others is not None:
            is_drawn = is_drawn & ~others
    return Proposal(block, is_drawn, drafted.candidates, drafted.scores)
