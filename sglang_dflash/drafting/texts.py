"""The texts of running requests: drafts are looked up in them (`lookup.py` has the rule).

Letters in shapes: R requests, B block positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.draft_counters import DraftCounters
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
            verify_block: B, of the blocks that are verified. The draft's may be shorter.
            counters: the drafter's.
        """
        self.texts = torch.zeros_like(req_to_token, dtype=torch.int32)
        self._verify_block = verify_block
        self._ops, self._vocab_size, self._counters = ops, vocab_size, counters
        self._taken: Tensor | None = None

    def write(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Enter tokens. Of a block it may be drafts, too: those that are not accepted are
        overwritten by the next block before anything reads them.

        Args:
            rows, positions, tokens: int64, of shapes that broadcast.
        """
        self.texts[rows, positions] = tokens.clamp(max=_NO_TOKEN).int()

    def fill(self, drafted: Tensor, requests: RequestSlots) -> Tensor:
        """Blocks int64 `[R, B]`: the draft's, of up to B tokens, or by `continue_seen`, of the ops.
        After a draft's last token there is a token that is hardly accepted."""
        block = F.pad(drafted, (0, self._verify_block - drafted.shape[1]))
        self._taken = self._ops.continue_seen(block, self.texts, requests, self._vocab_size)
        return block

    def learn(self, lengths: Tensor) -> None:
        """Count what was accepted of the block: int64 `[R]` tokens, bonus tokens included."""
        if self._taken is not None:
            self._counters.add_sources(self._taken, lengths - 1)
