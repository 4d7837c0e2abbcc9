"""The target's token at every position of a drafted block, by SGLang's own rules.

Position 0 is an ordinary decoding step. So are the positions after it, with the penalties of the
drafts before them; unless the request has a custom logit processor, which may depend on any token
before, or a grammar that cannot look ahead: such a request commits one token per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.common.log import Log
from sglang_dflash.drafting.noise import BlockNoise, Proposal, SampleFilters
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.serving.step import sampling
from sglang_dflash.serving.step.batch import ScheduleBatch, to_device
from sglang_dflash.serving.step.penalties import BlockPenalties

logger = Log(__name__)


class TargetTokens:
    """Picks the target's token at every block position.

    Attributes:
        penalties: of the block.
    """

    def __init__(
        self,
        sampler: Any,
        ranks: sampling.Ranks,
        penalties: BlockPenalties,
        ops: TorchOps | None = None,
    ) -> None:
        """`ops`: draw samples; None if SGLang's sampler does."""
        self._sampler, self._ranks, self.penalties = sampler, ranks, penalties
        self._ops = ops
        self._warned = set[str]()

    def __call__(
        self,
        batch: ScheduleBatch,
        output: sampling.LogitsProcessorOutput,
        block: Tensor,
        positions: Tensor,
        make_grammar_masks: Callable[[], Any],
        proposal: Proposal | None = None,
    ) -> Tensor:
        """Tokens int64 `[R, W]` of the target.

        Args:
            batch: the running requests.
            output: with logits `[R * W, V]` after each token of the block; adjusted in place.
                SGLang's sampler turns them to probabilities, unless log-probabilities need them.
                Gets the sampling masks, if a request asks for them.
            block: int64 `[R, W]`.
            positions: int64 `[R, W]`.
            make_grammar_masks: from `sampling.prepare_grammar_masks`.
            proposal: None if no draft was drawn, see `draws`.
        """
        logits = output.next_token_logits
        masks = make_grammar_masks()
        info = batch.sampling_info
        if info is not None:
            self._adjust(logits, block, info, masks)
        if info is None or (info.is_all_greedy and info.sampling_mask_batch_indices is None):
            # As SGLang's sampler does, of logits that are not a number.
            sampling.sanitize_nan_logits(logits, "sampler: next_token_logits")
            tokens = logits.argmax(-1)
        else:
            tokens = self._sample(batch, output, positions, proposal)
        self._ranks.target_tokens(tokens, info, self._sampler)
        return tokens.view(block.shape)

    def _adjust(
        self,
        logits: Tensor,
        block: Tensor,
        info: sampling.SamplingBatchInfo,
        masks: sampling.GrammarMasks | None,
    ) -> None:
        """Adjust logits `[R * W, V]` in place, in the order of a plain decoding step: penalties,
        grammars' masks, bias, custom processors. A processor that keeps the likeliest tokens must
        see only those that the grammar allows.

        Processors get the first position only: their requests take one token per step.
        """
        by_position = logits.unflatten(0, block.shape)
        if sampling.has_penalties(info):
            sampling.adjust_first(by_position, lambda first: sampling.apply_penalties(first, info))
            if block.shape[1] > 1:
                self.penalties.apply(by_position, block)
        if masks is not None:
            masks.apply(logits)
        if info.logit_bias is not None:
            by_position += info.logit_bias[:, None]
        if info.has_custom_logit_processor:
            sampling.adjust_first(
                by_position, lambda first: sampling.apply_custom_logit_processor(first, info)
            )

    def draws(self, batch: ScheduleBatch) -> bool:
        """Return whether `__call__` can take drafts that were drawn."""
        shows_masks = batch.sampling_info.sampling_mask_batch_indices is not None
        return self._ops is not None and not shows_masks and self._ranks.accept_alike

    def _sample(
        self,
        batch: ScheduleBatch,
        output: sampling.LogitsProcessorOutput,
        positions: Tensor,
        proposal: Proposal | None,
    ) -> Tensor:
        """Sample a token int64 `[R * W]` from each row of the logits `[R * W, V]`.

        A sample is the token of the largest logit / temperature + noise. SGLang's sampler moves
        eleven to thirty times the bytes for it: it makes probabilities, sorts them, and computes
        their logarithms.

        Its sampler turns logits into probabilities in place. A copy of all of them, gigabytes for a
        large batch, is made only if something else is still to be computed from them.
        """
        logits = output.next_token_logits
        if self._ops is not None and batch.sampling_info.sampling_mask_batch_indices is None:
            return self._sample_by_ops(self._ops, batch, logits, positions, proposal)
        sampled = sampling.LogitsProcessorOutput(
            next_token_logits=logits.clone() if batch.return_logprob else logits
        )
        repeated = sampling.repeated_sampling_info(batch.sampling_info, positions.shape[1])
        tokens = self._sampler(sampled, repeated, False, [], [], positions.flatten()).long()
        output.sampling_mask_output = sampled.sampling_mask_output
        return tokens

    def _sample_by_ops(
        self,
        ops: TorchOps,
        batch: ScheduleBatch,
        logits: Tensor,
        positions: Tensor,
        proposal: Proposal | None,
    ) -> Tensor:
        """Samples int64 `[R * W]` of logits that stay as they are."""
        sampling.sanitize_nan_logits(logits, "sampler: next_token_logits")
        info = batch.sampling_info
        noise = sampling.sampled_noise(info, positions[:, 0].contiguous())
        filters = SampleFilters(info.top_ks, info.top_ps, info.min_ps)
        is_unfiltered = sampling.is_unfiltered(batch)
        return ops.sample(logits, noise, None if is_unfiltered else filters, proposal)

    def warm_up(self, vocab_size: int, candidates: int, device: torch.device) -> None:
        """Let the kernels of penalties and samples be compiled for the target's logits, before a
        request needs them.

        Args:
            candidates: of a draft (`HeadModule.candidates`).
        """
        self.penalties.warm_up(vocab_size)
        if self._ops is None:
            return
        zeros, ones = (make(1, device=device) for make in (torch.zeros, torch.ones))
        noise = BlockNoise(zeros.long(), ones, zeros.long())
        block, scores = zeros.long().repeat(1, 2), zeros.repeat(1, 1, candidates)
        drawn = Proposal(block, ones > 0, scores.long(), scores)
        logits = torch.zeros(2, vocab_size, device=device)
        for filters in (None, SampleFilters(ones.int(), ones, zeros)):
            for proposal in (None, drawn):
                self._ops.sample(logits, noise, filters, proposal)

    def single_token_mask(self, batch: ScheduleBatch, mask: Sequence[bool]) -> Tensor | None:
        """The mask of `Step.takes_one_token` on the device, bool `[R]`; None if no request does."""
        if not any(mask):
            return None
        for request in batch.reqs:
            self._warn(request)
        # The target computes the block by now: the host must not wait for it.
        return to_device(torch.tensor(mask), batch.seq_lens.device)

    def _warn(self, request: Any) -> None:
        """Log each reason why requests take one token per step, once."""
        reasons = {
            "a custom logit processor: their logits may depend on each token before": bool(
                request.custom_logit_processor
            ),
            f"a grammar of the kind {type(request.grammar).__name__}: of SGLang's, those of "
            "xgrammar and llguidance can look ahead": not sampling.looks_ahead(request.grammar),
        }
        for reason, holds in reasons.items():
            if holds and reason not in self._warned:
                self._warned.add(reason)
                logger.warning("decoding one token per step for requests with %s", reason)


def takes_one_token(request: Any) -> bool:
    """Return whether the request takes one token per step: its own logits processor or its grammar
    can judge the first position of a block only."""
    return bool(request.custom_logit_processor) or not sampling.looks_ahead(request.grammar)
