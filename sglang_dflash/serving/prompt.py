"""What the drafter takes of a prompt: the tokens it can ever see, and cached ones whose draft K/V
is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dflash.core.kv_cache import DraftKVCache
from sglang_dflash.core.options import ContextWindow
from sglang_dflash.serving.batch import ScheduleBatch


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of one prefill forward, request after request. All on the host.

    Attributes:
        rows: int64 `[N]`, rows of the batch.
        positions: int64 `[N]`.
        visible: bool `[N]`, whether a draft can ever see the token.
    """

    rows: Tensor
    positions: Tensor
    visible: Tensor

    @classmethod
    def of(
        cls,
        starts: Sequence[int],
        ends: Sequence[int],
        lengths: Sequence[int],
        window: ContextWindow | None,
    ) -> PromptTokens:
        """Positions `starts ... ends - 1` of requests with `lengths` tokens before their first
        draft."""
        counts = torch.tensor(ends) - torch.tensor(starts)
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        positions = torch.cat(
            [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        )
        if window is None:
            return cls(rows, positions, torch.ones_like(positions, dtype=torch.bool))
        first = torch.tensor(lengths) - window.tokens
        return cls(rows, positions, (positions >= first[rows]) | (positions < window.sinks))

    @property
    def age(self) -> Tensor:
        """Int64 `[N]`: tokens between each one and its request's last one here."""
        requests = int(self.rows.max()) + 1 if len(self.rows) else 0
        last = torch.zeros(requests, dtype=torch.int64)
        last.scatter_reduce_(0, self.rows, self.positions, "amax")
        return last[self.rows] - self.positions


def lengths_before_drafting(batch: ScheduleBatch) -> list[int]:
    """Tokens per request when its prefill is complete; a chunk is a part of it."""
    return [len(request.origin_input_ids) + len(request.output_ids) for request in batch.reqs]


def missing_tails(
    batch: ScheduleBatch,
    req_to_token: Tensor,
    cache: DraftKVCache,
    window: ContextWindow | None,
    limit: int,
) -> list[int]:
    """Cached prefix tokens per request, counted back from the prefix's end, that the target should
    compute again for the drafter.

    The tail begins at the first visible token without draft K/V and has at most `limit` tokens.
    Reads the device once per prefill.

    Args:
        batch: the prefill.
        req_to_token: int `[rows, positions]`, the request-to-token table.
        cache: the draft KV cache.
        window: what drafts see.
        limit: tokens at most.
    """
    starts = [max(0, prefix - limit) for prefix in batch.prefix_lens]
    lengths = lengths_before_drafting(batch)
    tokens = PromptTokens.of(starts, batch.prefix_lens, lengths, window)
    if not len(tokens.positions):
        return [0] * len(starts)
    device = req_to_token.device
    rows = batch.req_pool_indices.long()[tokens.rows.to(device)]
    _, live = cache.find(req_to_token[rows, tokens.positions.to(device)].long())
    lost = tokens.visible & ~live.cpu()
    missing = [0] * len(starts)
    # Backwards, so that each request's first lost position is the one that counts.
    lost_rows, lost_positions = tokens.rows[lost].tolist(), tokens.positions[lost].tolist()
    for row, position in zip(lost_rows[::-1], lost_positions[::-1], strict=True):
        missing[row] = batch.prefix_lens[row] - position
    return missing
