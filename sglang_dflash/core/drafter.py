"""The drafter as its callers see it: it absorbs what the target computed, and proposes the next
block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_dflash.core.attention.backend import DraftAttention
from sglang_dflash.core.attention.table import ContextTable
from sglang_dflash.core.attention.visibility import context_positions
from sglang_dflash.core.draft_counters import DraftCounters
from sglang_dflash.core.kv_cache import DraftKVCache
from sglang_dflash.core.model import DraftModel
from sglang_dflash.core.options import ResolvedOptions


@dataclass(frozen=True)
class TargetHead:
    """What the drafter borrows of the target.

    Attributes:
        embed: ids int64 `[N]` -> embeddings `[N, E]`.
        argmax: hidden states `[N, E]` -> ids int64 `[N]` of the largest logits; -1 if that logit is
            not finite.
    """

    embed: Callable[[Tensor], Tensor]
    argmax: Callable[[Tensor], Tensor]


class Proposer(Protocol):
    """What a serving loop asks of a drafter. Another draft head is a class with these methods.

    The caller owns the mapping from a request's positions to target slots; a drafter never sees a
    request.
    """

    cache: DraftKVCache
    counters: DraftCounters

    def absorb(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        keep: Tensor | None = None,
        quota: int | None = None,
    ) -> None:
        """Take in tokens that the target has computed.

        Args:
            target_hidden: `[N, F * E]`, outputs of the target layers that the draft reads, side by
                side.
            positions: int64 `[N]`.
            slots: int64 `[N]`, the tokens' slots in the target's KV pool.
            keep: bool `[N]`, False for drafted tokens that were not accepted; None keeps all.
            quota: entries of a full cache that these tokens may take (see `DraftKVCache.write`).
        """

    def visible_context(self, seq_lens: Tensor, longest: int) -> Tensor:
        """Positions int64 `[R, C]` whose slots `propose` needs.

        Args:
            seq_lens: int64 `[R]`, committed tokens.
            longest: a bound on `seq_lens` that is known on the host.
        """

    def propose(self, bonus: Tensor, seq_lens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Draft one block per request.

        Args:
            bonus: int64 `[R]`, each request's newest token. Its position is `seq_lens`, and no
                cache holds it yet.
            seq_lens: int64 `[R]`, committed tokens.
            positions: int64 `[R, C]`, from `visible_context`.
            slots: int64 `[R, C]`, the target slots at these positions (any valid slot if the
                position is >= seq_len).

        Returns:
            int64 `[R, B]`: the bonus token and B - 1 drafted ones, all of them valid token ids.
        """


class Drafter:
    """DFlash drafting (arXiv 2602.06036, section 4): one forward fills the block. A `Proposer`."""

    def __init__(
        self,
        model: DraftModel,
        head: TargetHead,
        cache: DraftKVCache,
        options: ResolvedOptions,
        attention: DraftAttention,
    ) -> None:
        self.model, self.head, self.cache, self.attention = model, head, cache, attention
        self.counters = DraftCounters(cache.kv.device)
        self.block_size, self.context_window = options.block_size, options.context_window

    def absorb(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        keep: Tensor | None = None,
        quota: int | None = None,
    ) -> None:
        if len(slots) == 0:
            return
        kv = self.model.context_kv(target_hidden, positions)
        # Masked entries take part in 0 times V: a NaN would reach other requests.
        finite = kv.flatten(1).isfinite().all(1)
        self.counters.add_nonfinite(~finite if keep is None else keep & ~finite)
        self.cache.write(slots, kv.where(finite[:, None, None, None, None], 0), keep, quota)

    def visible_context(self, seq_lens: Tensor, longest: int) -> Tensor:
        window = self.context_window
        width = longest if window is None else min(longest, window.size)
        return context_positions(seq_lens, width, window)

    def propose(self, bonus: Tensor, seq_lens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        block = self.block_size
        ids = bonus[:, None].repeat(1, block)
        ids[:, 1:] = self.model.config.mask_token_id
        block_positions = seq_lens[:, None] + torch.arange(block, device=seq_lens.device)
        sought = positions < seq_lens[:, None]
        entries, live = self.cache.read(slots, sought)
        if self.cache.is_bounded:
            self.counters.add_context(sought, live)
        self.attention.prepare(self.cache.kv, ContextTable(entries, live, positions, seq_lens))
        embedded = self.head.embed(ids.flatten()).unflatten(0, ids.shape)
        hidden = self.model(embedded, block_positions, self.attention.attend)
        # A v1 draft proposes its argmax, a point mass.
        drafted = self.head.argmax(hidden[:, 1:].flatten(0, 1)).unflatten(0, (-1, block - 1))
        broken = drafted < 0
        self.counters.add_nonfinite(broken)
        ids[:, 1:] = drafted.where(~broken, self.model.config.mask_token_id)
        return ids


# A draft head other than ours is made by a function with the signature of `Drafter`.
DrafterFactory = Callable[
    [DraftModel, TargetHead, DraftKVCache, ResolvedOptions, DraftAttention], Proposer
]
