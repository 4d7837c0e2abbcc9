"""The drafter as its users see it: it absorbs what the target computed, and proposes the next block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dflash.core.attention.reference import (
    BlockAttention,
    context_positions,
    torch_block_attention,
    visibility,
)
from sglang_dflash.core.kv_cache import DraftKVCache
from sglang_dflash.core.model import DraftModel
from sglang_dflash.core.options import Options


@dataclass(frozen=True)
class TargetHead:
    """What the drafter borrows of the target: `embed` ids `[N]` -> `[N, E]`, and `argmax` hidden `[N, E]` -> ids int64 `[N]`."""

    embed: Callable[[Tensor], Tensor]
    argmax: Callable[[Tensor], Tensor]


class Drafter:
    """DFlash drafting (arXiv 2602.06036, section 4) over a cache of context K/V.

    The caller owns the mapping from a request's positions to slots; the drafter never sees a request.
    """

    def __init__(
        self,
        model: DraftModel,
        head: TargetHead,
        cache: DraftKVCache,
        options: Options,
        attention: BlockAttention = torch_block_attention,
    ) -> None:
        """`options`: resolved against the model's config (`Options.resolve`)."""
        assert options.block_size is not None
        self.model, self.head, self.cache, self.attention = model, head, cache, attention
        self.block_size: int = options.block_size
        self.window, self.sinks = options.window, options.sinks

    def absorb(
        self,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        keep: Tensor | None = None,
        share: int | None = None,
    ) -> None:
        """Turn tokens' target hidden states into context K/V.

        Args:
            features: `[N, F * E]`, outputs of the target layers that the draft was trained on, side by side.
            positions: int64 `[N]`.
            slots: int64 `[N]`, the tokens' slots in the target's KV pool.
            keep: bool `[N]`, False for tokens that were drafted but not accepted; None keeps all.
            share: entries of a full cache that these tokens may take from others (see `DraftKVCache.write`).
        """
        if len(slots):
            self.cache.write(slots, self.model.context_kv(features, positions), keep, share)

    def visible_context(self, seq_lens: Tensor, longest: int) -> Tensor:
        """Positions int64 `[R, C]` whose slots `propose` wants; `longest`: a host-side bound on `seq_lens`."""
        width = longest if self.window is None else min(longest, self.window + self.sinks)
        return context_positions(seq_lens, width, self.window, self.sinks)

    def propose(self, bonus: Tensor, seq_lens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Draft one block per request.

        Args:
            bonus: int64 `[R]`, each request's newest token, which stands at position `seq_lens` and is not in any cache yet.
            seq_lens: int64 `[R]`, committed tokens.
            positions: int64 `[R, C]`, from `visible_context`.
            slots: int64 `[R, C]`, the target slots at these positions (anything valid where a position >= seq_len).

        Returns:
            int64 `[R, B]`: the bonus token and B - 1 drafted ones. A v1 draft proposes its argmax, a point mass.
        """
        block = self.block_size
        ids = bonus[:, None].repeat(1, block)
        ids[:, 1:] = self.model.config.mask_token_id
        at = seq_lens[:, None] + torch.arange(block, device=seq_lens.device)
        hidden = self.model(
            self.head.embed(ids.flatten()).unflatten(0, ids.shape),
            at,
            self._attend(positions, seq_lens, slots),
        )
        ids[:, 1:] = self.head.argmax(hidden[:, 1:].flatten(0, 1)).unflatten(0, (-1, block - 1))
        return ids

    def _attend(
        self, positions: Tensor, seq_lens: Tensor, slots: Tensor
    ) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        block, layers = self.block_size, self.model.config.layers
        kv, seen = self.cache.gather(slots, positions < seq_lens[:, None], room=block)
        masks = {kind: visibility(kind, positions, seq_lens, seen, block) for kind in set(layers)}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv[:, -block:, layer, 0], kv[:, -block:, layer, 1] = k, v
            context = kv[:, :, layer].to(q.dtype)
            return self.attention(q, context[:, :, 0], context[:, :, 1], masks[layers[layer]])

        return attend
