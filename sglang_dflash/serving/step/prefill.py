"""A prefill: the target computes the prompt, the drafter takes in what it can ever see of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.visibility import ever_visible
from sglang_dflash.drafting.drafter import Proposer
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.facts.draft_config import Reach
from sglang_dflash.serving.show.counts import IgnoredSeeds
from sglang_dflash.serving.step.batch import (
    CaptureHiddenMode,
    GenerationBatchResult,
    ScheduleBatch,
    draft_input,
    replace_hidden_states,
    to_device,
)
from sglang_dflash.serving.step.sampling import Ranks

Publish = Callable[[Tensor], None]
Barrier = Callable[[], None]


class PrefillStep:
    """Prefill steps of the worker.

    Attributes:
        ignored_seeds: requests whose seed has no effect.
    """

    def __init__(
        self,
        target_worker: Any,
        drafter: Proposer,
        req_to_token: Tensor,
        reach: Reach,
        ranks: Ranks,
        max_running_requests: int,
    ) -> None:
        self._target_worker, self._drafter = target_worker, drafter
        self._table = req_to_token
        self._reach, self._ranks = reach, ranks
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
        writes = place_prompt(batch, self._table, self._drafter.cache, self._reach)
        result = self._target_worker.forward_batch_generation(
            batch, pp_proxy_tensors=pp_proxy_tensors, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        self._ranks.prompt_tokens(result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        publish(result.new_seq_lens)
        self._absorb(writes, len(batch.reqs), result.logits_output)
        replace_hidden_states(batch, result.logits_output)
        # Of decoding requests that take part, the host does not know the next token yet.
        in_flight = int(batch.forward_mode.is_mixed())
        result.next_draft_input = draft_input(result.next_token_ids, batch.seq_lens, in_flight)
        return result

    def _absorb(self, writes: PromptWrites, requests: int, output: Any) -> None:
        """Pass the hidden states of prompt tokens of that many requests to the drafter."""
        quota = requests * self._drafter.cache.num_entries // self._max_running_requests
        features = writes.features(output.hidden_states)
        self._drafter.absorb(features, writes.positions, writes.slots, quota=quota)


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
        reach: Reach,
    ) -> PromptTokens:
        """Positions `starts ... ends - 1` of requests with `lengths` tokens before their first
        draft."""
        counts = torch.tensor(ends) - torch.tensor(starts)
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        positions = torch.cat(
            [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        )
        visible = ever_visible(positions, torch.tensor(lengths)[rows], reach)
        return cls(rows, positions, visible)

    @property
    def age(self) -> Tensor:
        """Int64 `[N]`: tokens between each one and its request's last one here."""
        requests = int(self.rows.max()) + 1 if len(self.rows) else 0
        last = torch.zeros(requests, dtype=torch.int64)
        last.scatter_reduce_(0, self.rows, self.positions, "amax")
        return last[self.rows] - self.positions


class PromptWrites(NamedTuple):
    """What the drafter takes in of a prefill forward, on the device. Known before the forward.

    Attributes:
        tokens: N, the tokens of the forward. Rows of its hidden states after them are padding.
        kept: int64 `[M]`, rows of the tokens to write, in the order in which to write them; a slice
            if all are written where they are.
        positions: int64 `[M]`.
        slots: int64 `[M]`, in the target's KV pool.
    """

    tokens: int
    kept: Tensor | slice
    positions: Tensor
    slots: Tensor

    def features(self, target_hidden: Tensor) -> Tensor:
        """The rows `[M, F * E]` to write, of the forward's hidden states `[>= N, F * E]`."""
        return target_hidden[: self.tokens][self.kept]


def place_prompt(
    batch: ScheduleBatch,
    req_to_token: Tensor,
    cache: DraftKVCache,
    reach: Reach,
) -> PromptWrites:
    """Choose the prompt tokens to project and find their slots; mark the slots of all tokens dead.

    To be called before the target's forward starts. SGLang may change the request-to-token table as
    soon as that forward has read it, and a copy from the host after it would wait for it.

    Args:
        batch: the prefill.
        req_to_token: int `[rows, positions]`, the request-to-token table.
        cache: the draft KV cache.
        reach: what drafts see.
    """
    starts = batch.prefix_lens
    ends = [prefix + n for prefix, n in zip(starts, batch.extend_lens, strict=True)]
    # When the prefill is complete; a chunk is a part of it.
    lengths = [len(request.origin_input_ids) + len(request.output_ids) for request in batch.reqs]
    tokens = PromptTokens.of(starts, ends, lengths, reach)
    rows, positions = to_device(torch.stack((tokens.rows, tokens.positions)), req_to_token.device)
    slots = req_to_token[batch.req_pool_indices.long()[rows], positions].long()
    # What these slots held before must not be read, whether or not their tokens are written.
    cache.forget(slots)
    kept = cache.prompt_tokens_to_write(tokens.visible, tokens.age)
    if isinstance(kept, Tensor):
        kept = to_device(kept, req_to_token.device)
    return PromptWrites(len(slots), kept, positions[kept], slots[kept])
