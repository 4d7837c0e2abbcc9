"""What the target says at every position of a drafted block, by the engine's own rules and its own sampler.

Position 0 is an ordinary decoding step. The positions after it are ordinary steps too, as long as the request's logits do
not depend on the tokens before them; a request for which they do (penalties, custom processors) commits one token per step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.serving import compat

logger = logging.getLogger(__name__)


class TargetTokens:
    """Samples the target's token at every block position."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._told = False

    def __call__(
        self,
        batch: compat.ScheduleBatch,
        logits: Tensor,
        block: Tensor,
        positions: Tensor,
        barrier: Callable[[], None] | None,
    ) -> Tensor:
        """Logits `[R * B, V]` (adjusted in place) after the tokens `block` `[R, B]` at `positions` `[R, B]`: int64 `[R, B]`."""
        rows, width = block.shape
        mask = compat.grammar_mask(batch, block, logits.device, barrier)
        info = batch.sampling_info
        if info is not None and compat.adjusts_logits(info):
            by_position = logits.view(rows, width, -1)
            first = by_position[:, 0].clone()
            compat.plain_step_logits(first, info)
            if info.logit_bias is not None:
                by_position += info.logit_bias[:, None]
            by_position[:, 0] = first
        if mask is not None:
            mask.apply(logits)
        if info is None or info.is_all_greedy:
            said = logits.argmax(-1)
        else:
            # The sampler turns logits into probabilities in place; log-probabilities still want the logits.
            output = compat.LogitsProcessorOutput(next_token_logits=logits.clone())
            said = self._sampler(
                output,
                compat.repeated_sampling_info(info, width),
                False,
                [],
                [],
                positions.flatten(),
            ).long()
        if info is not None:
            compat.same_on_all_ranks(said, self._sampler, info)
        return said.view(rows, width)

    def one_at_a_time(self, batch: compat.ScheduleBatch) -> Tensor | None:
        """Bool `[R]`: requests whose logits depend on every token before, or None where there are none."""
        info = batch.sampling_info
        if info is None or not (info.has_custom_logit_processor or compat.has_penalties(info)):
            return None
        if not self._told:
            self._told = True
            logger.warning(
                "DFLASH: requests with frequency, presence or repetition penalties, min_new_tokens or a custom logit processor "
                "commit one token per step: their logits depend on each token before."
            )
        alone = [_depends_on_history(request) for request in batch.reqs]
        return torch.tensor(alone, device=batch.seq_lens.device)


def _depends_on_history(request: Any) -> bool:
    p = request.sampling_params
    penalties = (
        p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or p.min_new_tokens
    )
    return bool(penalties or request.custom_logit_processor)
