"""The drafter: it absorbs the target's hidden states, and proposes the next block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.groups import ALL_TOKENS, ContextWrite, KVGroup
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import BlockNoise, SampledBlocks
from sglang_dflash.drafting.options import MOST_PROJECTED, ResolvedOptions


class PromptWrites(NamedTuple):
    """The part of a prefill forward that the drafter writes.

    Attributes:
        rows: int64 `[N]`, the tokens' rows of the forward's hidden states; None for the first N.
        writes: the tokens that each of the drafter's groups writes.
    """

    rows: Tensor | None
    writes: Sequence[ContextWrite]


class Proposer(Protocol):
    """The interface of a drafter that a serving loop calls.

    The caller owns the mapping from a request's positions to target slots (`RequestSlots`); a
    drafter keeps no state of a request.
    """

    groups: Sequence[KVGroup]
    counters: DraftCounters

    def absorb(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        committed: Tensor | None = None,
        prompt: PromptWrites | None = None,
    ) -> None:
        """Write draft K/V of N tokens that the target has computed.

        Args:
            target_hidden: `[>= N, F * E]`, outputs of the target layers that the draft reads, side
                by side; those of the tokens come first.
            positions: int64 `[N]`.
            slots: int64 `[N]`, the tokens' slots in the target's KV pool.
            committed: bool `[N]`, False for drafted tokens that were not accepted; None if all are.
            prompt: of a prompt, the part of it that is written; None for all.
        """

    def propose(
        self,
        bonus: Tensor,
        requests: RequestSlots,
        noise: BlockNoise | None = None,
        width: int | None = None,
    ) -> Tensor | SampledBlocks:
        """Draft one block per request.

        Args:
            bonus: int64 `[R]`, each request's newest token. Its position is the request's
                `seq_lens`, and no cache holds it yet.
            requests: where the committed tokens lie.
            noise: what the target samples the block's tokens with; None if it samples none.
            width: tokens of the block that are wanted, the bonus token included; None for all. A
                drafter may return more.

        Returns:
            int64 `[R, B]`: the bonus token and B - 1 drafted ones, all of them valid token ids.
            With noise, it may be `SampledBlocks`.
        """

    def describe(self) -> Mapping[str, Any]:
        """Return the settings that /server_info shows."""

    def report(self) -> Mapping[str, Any]:
        """Return the counts that /server_info shows."""


class Drafter:
    """DFlash drafting (arXiv 2602.06036, section 4): one forward fills the block. A `Proposer`."""

    def __init__(
        self,
        model: DraftModel,
        target: TargetHead,
        groups: Sequence[KVGroup],
        options: ResolvedOptions,
    ) -> None:
        """`groups`: of all layers of the model, by `DraftConfig.groups`."""
        self.model = model
        self.groups: Sequence[KVGroup] = tuple(groups)
        self.head, self._embed = model.make_head(target), target.embed
        self.counters = DraftCounters(model.device)
        # Tokens of the block that is drafted; of a request that a step commits, at most.
        self.draft_block, self.verify_block = options.draft_block, options.verify_block
        self._attend = {
            number: partial(group.attention.attend, i)
            for group in groups
            for i, number in enumerate(group.layer_group.numbers)
        }

    def columns(self, requests: RequestSlots) -> int:
        """Columns of the widest table of a step."""
        return max(requests.columns(group.reach) for group in self.groups)

    def absorb(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        committed: Tensor | None = None,
        prompt: PromptWrites | None = None,
    ) -> None:
        if len(slots) == 0:
            return
        rows, writes = prompt or PromptWrites(None, (ALL_TOKENS,) * len(self.groups))
        entries = [
            group.place(slots, committed, write)
            for group, write in zip(self.groups, writes, strict=True)
        ]
        for first in range(0, len(slots), MOST_PROJECTED):
            piece = slice(first, min(first + MOST_PROJECTED, len(slots)))
            self.store(
                target_hidden[piece if rows is None else rows[piece]],
                positions[piece],
                None if committed is None else committed[piece],
                [of_group[piece] for of_group in entries],
            )

    def store(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        committed: Tensor | None,
        entries: Sequence[Tensor],
    ) -> None:
        """Project tokens, and store their K/V in entries int64 `[N]` of each group. For the rest
        see `Proposer.absorb`."""
        features = self.model.context_features(target_hidden)
        broken = nonfinite_rows(features)
        self.counters.add_nonfinite(broken if committed is None else committed & broken)
        kv = self.model.project_context(features)
        for group, of_group in zip(self.groups, entries, strict=True):
            group.store(self.model, kv, positions, of_group)

    def propose(
        self,
        bonus: Tensor,
        requests: RequestSlots,
        noise: BlockNoise | None = None,
        width: int | None = None,
    ) -> Tensor | SampledBlocks:
        # The lm_head is most of a proposal: only what the step verifies is drafted.
        return self.draft(self.forward(bonus, requests)[:, :width], bonus, noise)

    def draft(
        self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None
    ) -> Tensor | SampledBlocks:
        """Draft the first W tokens of blocks from their hidden states `[R, W, E]`. For the rest see
        `Proposer.propose`."""
        drafted = self.head(hidden, bonus, noise)
        tokens = drafted.tokens if isinstance(drafted, SampledBlocks) else drafted
        broken = tokens < 0
        # With noise, scores are finite where logits are.
        self.counters.add_nonfinite(broken.view(-1, *hidden.shape[:1], tokens.shape[-1])[0])
        tokens = tokens.masked_fill(broken, self.model.config.mask_token_id)
        blocks = torch.cat((bonus[:, None].expand(*tokens.shape[:-1], 1), tokens), -1)
        return drafted._replace(tokens=blocks) if isinstance(drafted, SampledBlocks) else blocks

    def forward(self, bonus: Tensor, requests: RequestSlots) -> Tensor:
        """The draft's hidden states `[R, B, E]` of the block of bonus and mask tokens."""
        ops, block = self.model.ops, self.draft_block
        for group in self.groups:
            group.prepare(self.model, requests, self.counters)
        mask_id = self.model.config.mask_token_id
        ids, positions = ops.prepare_block(bonus, requests.seq_lens, block, mask_id)
        embedded = self._embed(ids.flatten()).unflatten(0, ids.shape)
        attend = self._attend
        return self.model(embedded, positions, lambda layer, *qkv: attend[layer](*qkv))

    def describe(self) -> Mapping[str, Any]:
        return {}

    def report(self) -> Mapping[str, Any]:
        return {}


def nonfinite_rows(features: Tensor) -> Tensor:
    """Return bool `[N]`, True for a token of whose features `[N, E]` one or more are NaN or Inf.

    Not all of them need be: of a sum that overflows before a norm, the norm makes NaN, and zeros of
    the token's other features.
    """
    # Finite features are far from the limits of float32, and so is their sum.
    total = features.sum(-1, dtype=torch.float32)
    # The difference is NaN if it is not finite. Two launches; `isfinite` and `~` take five.
    return total - total != 0
