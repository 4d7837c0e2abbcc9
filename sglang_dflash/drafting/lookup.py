"""Lookup: the texts of running requests, and drafts from them.

`text_match` finds what followed the newest tokens before, `draft_source` chooses between that and
the draft model's drafts.

Letters in shapes: R requests; W positions of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.draft_source import DraftsBySource, DraftSource
from sglang_dflash.drafting.ops import TorchOps

# What stands for ids that the table does not hold, such as hashes of images.
_NO_TOKEN = 2**31 - 1


class Lookup:
    """The texts of running requests, and drafts from them.

    Attributes:
        texts: int32 `[rows, positions]`, beside SGLang's request-to-token table: at a row and a
            position the token whose slot that table has there.
    """

    def __init__(
        self,
        req_to_token: Tensor,
        ops: TorchOps,
        verify_block: int,
        vocab_size: int,
        counters: DraftCounters,
    ) -> None:
        """
        Args:
            verify_block: positions of a step, at most.
            counters: the drafter's.
        """
        self.texts = torch.zeros_like(req_to_token, dtype=torch.int32)
        self._source = DraftSource(verify_block, vocab_size, counters)
        # Always as many: a kernel is compiled for their number.
        self._count = verify_block - 1
        self._ops = ops
        self._step: DraftsBySource | None = None

    def write(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Enter tokens. Of a block it may be drafts, too: those that are not accepted are
        overwritten by the next block before anything reads them.

        Args:
            rows, positions, tokens: int64, of shapes that broadcast.
        """
        self.texts[rows, positions] = tokens.clamp(max=_NO_TOKEN).int()

    def fill(
        self, drafted: Tensor, likeliest: Tensor, requests: RequestSlots, width: int
    ) -> tuple[Tensor, Tensor]:
        """Return the block that a step verifies, int64 `[R, W]`: the draft's, or what the text has
        held; and the requests whose drafts are looked up, bool `[R]`.

        Args:
            drafted: int64 `[R, B]`, the bonus tokens and the draft's.
            likeliest: int64 `[R, B]`, the draft's likeliest tokens; they decide.
            width: W, at least 2.
        """
        bonus = drafted[:, 0].contiguous()
        match = self._ops.find_match(bonus, self.texts, requests, self._count)
        block, self._step = self._ops.choose_source(self._source, drafted, likeliest, *match, width)
        return block, self._step.looks_up

    def learn(self, accepted: Accepted) -> None:
        """Take in what was accepted of the block."""
        if self._step is not None:
            self._ops.learn_source(self._source, self._step, accepted)
