"""A prefill: the target computes the prompt, the drafter takes in what it can ever see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dflash.drafting.drafter import Proposer
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.options import ResolvedOptions
from sglang_dflash.serving.step.batch import (
    CaptureHiddenMode,
    GenerationBatchResult,
    ScheduleBatch,
    can_recompute_cached_tail,
    draft_input,
    recompute_cached_tail,
)
from sglang_dflash.serving.step.prompt import PromptWrites, missing_tails, place_prompt
from sglang_dflash.serving.step.request_fixes import IgnoredSeeds
from sglang_dflash.serving.step.sampling import Ranks

Publish = Callable[[Tensor], None]
Barrier = Callable[[], None]


class Prefill:
    """Prefill steps of the worker.

    Attributes:
        ignored_seeds: requests whose seed has no effect.
    """

    def __init__(
        self,
        target_worker: Any,
        drafter: Proposer,
        req_to_token: Tensor,
        options: ResolvedOptions,
        ranks: Ranks,
        max_running_requests: int,
    ) -> None:
        self._target_worker, self._drafter = target_worker, drafter
        self._table = req_to_token
        self._options, self._ranks = options, ranks
        self._max_running_requests = max_running_requests
        self.ignored_seeds = IgnoredSeeds()

    def __call__(
        self,
        batch: ScheduleBatch,
        publish: Publish,
        barrier: Barrier | None,
        pp_proxy_tensors: Any,
    ) -> GenerationBatchResult:
        """One prefill forward. `publish` takes the committed lengths."""
        if barrier is not None and batch.has_grammar and batch.forward_mode.is_mixed():
            # Decoding requests take part: the target samples their next token under grammars that
            # must have seen their last ones.
            barrier()
        self.ignored_seeds.warn_once(batch)
        cache = self._drafter.cache
        recomputed = self._lost_of_prefix(batch, cache)
        writes = place_prompt(batch, recomputed, self._table, cache, self._options.reach)
        with recompute_cached_tail(batch, recomputed):
            result = self._target_worker.forward_batch_generation(
                batch,
                pp_proxy_tensors=pp_proxy_tensors,
                capture_hidden_mode=CaptureHiddenMode.FULL,
            )
        self._ranks.prompt_tokens(result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        publish(result.new_seq_lens)
        self._absorb(writes, len(batch.reqs), result.logits_output)
        result.next_draft_input = draft_input(result.next_token_ids, batch.seq_lens, width=1)
        return result

    def _lost_of_prefix(self, batch: ScheduleBatch, cache: DraftKVCache) -> list[int]:
        """Cached tokens before each request's new ones that the target computes again, for their
        hidden states."""
        most = self._options.recompute_tail
        if not most or not can_recompute_cached_tail(batch):
            return [0] * len(batch.prefix_lens)
        return missing_tails(batch, self._table, cache, self._options.reach, most)

    def _absorb(self, writes: PromptWrites, requests: int, output: Any) -> None:
        """Pass the hidden states of prompt tokens of that many requests to the drafter."""
        quota = requests * self._drafter.cache.num_entries // self._max_running_requests
        features = writes.features(output.hidden_states)
        self._drafter.absorb(features, writes.positions, writes.slots, quota=quota)
        output.hidden_states = None
