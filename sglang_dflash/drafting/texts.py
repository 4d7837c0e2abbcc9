"""The texts of running requests: drafts are looked up in them (`lookup.py`).

Letters in shapes: R requests; W positions of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.draft_source import DraftSource
from sglang_dflash.drafting.ops import TorchOps

# What stands for ids that the table does not hold, such as hashes of images.
_NO_TOKEN = 2**31 - 1


class _Step(NamedTuple):
    """Attributes: see `DraftSource.learn` and `DraftSource.looks_up`."""

    classes: Tensor
    by_source: Tensor
    looks_up: Tensor


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
        self._source = DraftSource(verify_block, req_to_token.device)
        # Always as many: a kernel is compiled for their number.
        self._count = verify_block - 1
        self._ops, self._vocab_size, self._counters = ops, vocab_size, counters
        self._step: _Step | None = None

    def write(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Enter tokens. Of a block it may be drafts, too: those that are not accepted are
        overwritten by the next block before anything reads them.

        Args:
            rows, positions, tokens: int64, of shapes that broadcast.
        """
        self.texts[rows, positions] = tokens.clamp(max=_NO_TOKEN).int()

    def fill(self, drafted: Tensor, requests: RequestSlots, width: int) -> Tensor:
        """Return the block that a step verifies, int64 `[R, W]`: the draft's, or what the text has
        held. Positions after a draft's last token have a token that is rarely accepted.

        Args:
            drafted: int64 `[R, B]`, the bonus tokens and the draft's.
            width: W, at least 2.
        """
        bonus, drafts = drafted[:, 0].contiguous(), drafted[:, 1:width]
        drafts = F.pad(drafts, (0, width - 1 - drafts.shape[1]))
        lengths, followed = self._ops.seen_before(bonus, self.texts, requests, self._count)
        followed = followed[:, : width - 1]
        # Ids of images are none of the vocabulary.
        is_token = (followed >= 0) & (followed < self._vocab_size)
        looked_up = followed.where(is_token, drafts)
        classes = self._source.classes(lengths, drafts, looked_up)
        looks_up = self._source.looks_up(classes, width - 1)
        self._step = _Step(classes, torch.stack((drafts, looked_up)), looks_up)
        return torch.cat((bonus[:, None], looked_up.where(looks_up[:, None], drafts)), 1)

    def learn(self, accepted: Accepted) -> None:
        """Take in what was accepted of the block."""
        if self._step is not None:
            classes, by_source, looks_up = self._step
            self._counters.add_sources(looks_up, accepted.lengths - 1)
            self._source.learn(classes, by_source, accepted)
