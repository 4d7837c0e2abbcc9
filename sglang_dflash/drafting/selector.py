"""The weights of the candidate selector of DFlash2 drafts; `heads.SelectorHead` computes with them.

From z-lab's DFlash2 (`selector_rank`, `selector_top_k`).

Letters in shapes: r rank, E hidden size, V tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from sglang_dflash.checkpoint.draft_config import Selector


class CandidateSelector(nn.Module):
    """The weights. Every rank holds all of them.

    The score of candidate c after token p is its logit + <A[p] * project(hidden), B[c]>.

    Attributes:
        predecessor_codebook: A, `[V, r]`.
        successor_codebook: B, `[V, r]`.
        hidden_projection: `[E]` to `[r]`.
    """

    def __init__(self, width: int, vocab_size: int, config: Selector) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, config.rank))
        self.hidden_projection = nn.Linear(width, config.rank, bias=False)
