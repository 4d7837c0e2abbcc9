"""What the drafter takes of a prompt: the tokens it can ever see, and cached ones whose draft K/V it has lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dflash.core.kv_cache import DraftKVCache
from sglang_dflash.core.options import Options
from sglang_dflash.serving import compat


@dataclass(frozen=True)
class PromptTokens:
    """The tokens of one prefill forward, request after request: rows of the batch, positions, and whether a draft can ever
    see them; int64 and bool `[N]` on the host."""

    rows: Tensor
    positions: Tensor
    seen: Tensor

    @classmethod
    def of(
        cls, starts: Sequence[int], ends: Sequence[int], lengths: Sequence[int], options: Options
    ) -> PromptTokens:
        """Positions `starts ... ends - 1` of requests that have `lengths` tokens before their first draft."""
        counts = torch.tensor(ends) - torch.tensor(starts)
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        positions = torch.cat(
            [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        )
        if options.window is None:
            return cls(rows, positions, torch.ones_like(positions, dtype=torch.bool))
        first = torch.tensor(lengths) - options.window
        return cls(rows, positions, (positions >= first[rows]) | (positions < options.sinks))

    def newest_last(self) -> Tensor:
        """Indices int64 of the tokens seen, those nearest to their request's end last: what stays where not all can."""
        seen = self.seen.nonzero()[:, 0]
        last = torch.zeros(int(self.rows.max()) + 1 if len(self.rows) else 0, dtype=torch.int64)
        last.scatter_reduce_(0, self.rows, self.positions, "amax")
        return seen[(last[self.rows] - self.positions)[seen].argsort(descending=True, stable=True)]


def lengths_before_drafting(batch: compat.ScheduleBatch) -> list[int]:
    """Tokens per request when its prefill is done; a chunk is only a part of it."""
    return [len(request.origin_input_ids) + len(request.output_ids) for request in batch.reqs]


def missing_tails(
    batch: compat.ScheduleBatch, table: Tensor, cache: DraftKVCache, options: Options, limit: int
) -> list[int]:
    """Cached prefix tokens per request, counted back from the prefix's end, to compute again for the drafter's sake.

    From the first visible token without draft K/V on, at most `limit`. Reads the device once per prefill.

    Args:
        table: the request-to-token table, int `[rows, positions]`.
    """
    starts = [max(0, prefix - limit) for prefix in batch.prefix_lens]
    tokens = PromptTokens.of(starts, batch.prefix_lens, lengths_before_drafting(batch), options)
    if not len(tokens.positions):
        return [0] * len(starts)
    rows = batch.req_pool_indices.long()[tokens.rows.to(table.device)]
    _, live = cache.find(table[rows, tokens.positions.to(table.device)].long())
    lost = tokens.seen & ~live.cpu()
    missing = [0] * len(starts)
    # Backwards, so that each request's first lost position is the one that stays.
    for row, position in zip(
        tokens.rows[lost].tolist()[::-1], tokens.positions[lost].tolist()[::-1], strict=True
    ):
        missing[row] = batch.prefix_lens[row] - position
    return missing
