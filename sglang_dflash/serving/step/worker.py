"""The DFLASH worker: propose -> verify -> commit, on SGLang's target worker.

There is no draft ModelRunner: the drafter is a small network of ours with its own cache, keyed by
the target's KV slots. `serving/start/build.py` makes the worker, in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.attention.table import PADDING_SLOT, RequestSlots
from sglang_dflash.drafting.drafter import Proposer
from sglang_dflash.drafting.groups import clear
from sglang_dflash.drafting.lookup import Lookup
from sglang_dflash.drafting.noise import Proposal, likeliest, proposal_of, sampled
from sglang_dflash.drafting.pending_context import PendingContext
from sglang_dflash.serving.hybrid.rollback import Rollback
from sglang_dflash.serving.kv_transfer.host_tier import HostTier
from sglang_dflash.serving.metrics.counts import RequestStep
from sglang_dflash.serving.metrics.figures import Figures
from sglang_dflash.serving.step import sampling
from sglang_dflash.serving.step.batch import (
    DraftInput,
    GenerationBatchResult,
    ScheduleBatch,
    checkpoints_due,
    draft_input,
    host_lengths,
    record_stream,
    replace_hidden_states,
)
from sglang_dflash.serving.step.prefill import place_prompt, write_texts, write_texts_taken_over
from sglang_dflash.serving.step.seeds import Seeds
from sglang_dflash.serving.step.step import Step, StepObserver
from sglang_dflash.serving.step.target_forward import TargetForward
from sglang_dflash.serving.step.target_tokens import TargetTokens, takes_one_token
from sglang_dflash.serving.step.width import StepWidths

Publish = Callable[[Tensor], None]
Barrier = Callable[[], None]


@dataclass(eq=False, kw_only=True)
class DFlashWorker:
    """Serves `--speculative-algorithm DFLASH`, overlap scheduling on or off.

    Attributes:
        verify_block: most tokens per request that a step verifies.
        carried: most requests that run at a time, which share the rings.
        req_to_token: int32 `[rows, positions]`, SGLang's request-to-token table.
        accept: the accept rule, from drafts and the target's tokens to what a step commits.
        rollback: of recurrent layers; None without them.
        ranks: make tensor-parallel ranks agree on tokens.
        lookup: of drafts in the requests' texts; None without.
        host_tier: of draft K/V in host memory; None without a hierarchical cache.
        most_waiting_steps: plain steps whose hidden states may wait for the drafter.
        seeds: of the running requests.
        figures: what /server_info and /metrics show.
    """

    verify_block: int
    carried: int
    req_to_token: Tensor
    widths: StepWidths
    drafter: Proposer
    target_forward: TargetForward
    target_tokens: TargetTokens
    accept: sampling.AcceptRule
    rollback: Rollback | None
    ranks: sampling.Ranks
    lookup: Lookup | None
    host_tier: HostTier | None = None
    most_waiting_steps: int
    seeds: Seeds
    figures: Figures
    observer: StepObserver

    def __post_init__(self) -> None:
        self._offsets = torch.arange(self.verify_block, device=self.req_to_token.device)
        self._pending_context = PendingContext(self.drafter, self.most_waiting_steps)

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        grammar_barrier: Barrier | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """One scheduler step. `on_publish` takes the new committed lengths when they are known."""
        publish = on_publish or (lambda _: None)
        if batch.forward_mode.is_idle():
            self.stop_clocks()
            return self._idle(publish)
        with self.seeds.given(batch):
            if not batch.forward_mode.is_extend():
                with self.figures.times.step():
                    return self._decode(batch, publish, grammar_barrier)
            self.stop_clocks()
            self._run_host_copies(batch.out_cache_loc)
            self._pending_context.absorb()
            return self._prefill(batch, publish, grammar_barrier, pp_proxy_tensors)

    def _prefill(
        self, batch: ScheduleBatch, publish: Publish, barrier: Barrier | None, pp_proxy_tensors: Any
    ) -> GenerationBatchResult:
        if barrier is not None and batch.has_grammar and batch.forward_mode.is_mixed():
            # A mixed batch: the target samples the decoding requests' next tokens under grammars
            # that must have seen their last ones.
            barrier()
        # A prefill server has no decode steps, which show the counts elsewhere. These are those of
        # the prefills before: nothing is copied after the forward.
        self.drafter.counters.send()
        self.figures.add(())
        positions, slots, writes = place_prompt(
            batch, self.req_to_token, self.drafter.groups, self.carried
        )
        if self.lookup is not None:
            write_texts(batch, self.lookup)
        result = self.target_forward.prefill(batch, pp_proxy_tensors)
        self.ranks.prompt_tokens(result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        publish(result.new_seq_lens)
        hidden = result.logits_output.hidden_states
        self.drafter.absorb(hidden, positions, slots, prompt=writes)
        replace_hidden_states(batch, result.logits_output)
        # In a mixed batch under overlap, the host does not know the decoding requests' next
        # token yet.
        in_flight = int(batch.forward_mode.is_mixed() and batch.enable_overlap)
        result.next_draft_input = draft_input(result.next_token_ids, batch.seq_lens, in_flight)
        self.target_tokens.penalties.commit(batch, result.next_token_ids[:, None])
        return result

    def _decode(
        self, batch: ScheduleBatch, publish: Publish, barrier: Barrier | None
    ) -> GenerationBatchResult:
        with self.figures.times.phase("choose_width"):
            single = [takes_one_token(request) for request in batch.reqs]
            width = self.widths.choose(batch, single)
        step = self._next_step(batch, width, single)
        self._run_host_copies(step.slots.flatten())
        self.observer.before_step(batch, step)
        with self.figures.times.phase("propose"):
            block, proposal = self._propose(batch, step)
            if self.lookup is not None:
                self.lookup.write(step.rows[:, None], step.positions, block)
        with self.figures.times.phase("verify"), self.target_forward.at(step.width):
            result, accepted = self._verify(batch, step, block, proposal, barrier)
            new_seq_lens = step.seq_lens + accepted.lengths
            publish(new_seq_lens)
            if self.lookup is not None and step.width > 1:
                self.lookup.learn(accepted)
        with self.figures.times.phase("commit"):
            self._commit(batch, step, result.logits_output, accepted)
            self.drafter.counters.send()
        self.observer.after_step(batch, step, accepted, new_seq_lens)
        self.widths.steps[step.width] += 1
        # The target's own result has what else the request asked for, such as routed experts.
        result.next_token_ids = accepted.tokens.flatten()
        result.accept_lens, result.new_seq_lens = accepted.lengths.int(), new_seq_lens
        result.next_draft_input = draft_input(accepted.bonus, new_seq_lens, in_flight=step.width)
        result.speculative_num_draft_tokens = step.width
        result.cap_lens = step.verified_tokens
        return result

    def _next_step(self, batch: ScheduleBatch, width: int, single: Sequence[bool]) -> Step:
        record_stream(batch.seq_lens)
        rows, seq_lens = batch.req_pool_indices.long(), batch.seq_lens.long()
        positions = seq_lens[:, None] + self._offsets[:width]
        slots = self.req_to_token[rows[:, None], positions].long()
        ends = batch.spec_info.ends
        if ends is not None:
            slots = slots.masked_fill(positions >= ends[:, None], PADDING_SLOT)
        return Step(rows, seq_lens, positions, slots, single, ends)

    def _propose(self, batch: ScheduleBatch, step: Step) -> tuple[Tensor, Proposal | None]:
        """Return the block int64 `[R, W]`, each request's bonus token and then drafts, and what
        these were drawn from; None if they were not."""
        bonus = batch.spec_info.bonus_tokens.long()
        if step.width == 1:
            return bonus[:, None], None
        if self._pending_context.absorb():
            self.widths.clock.restart_step()
        longest = int(host_lengths(batch).max())
        requests = RequestSlots(self.req_to_token, step.rows, step.seq_lens, longest)
        noise = sampling.block_noise(batch.sampling_info, step.seq_lens)
        drafted = self.drafter.propose(bonus, requests, noise, step.width)
        block, looks_up = sampled(drafted), None
        if self.lookup is not None:
            block, looks_up = self.lookup.fill(block, likeliest(drafted), requests, step.width)
        block = self.ranks.drafts(block[:, : step.width].contiguous())
        seeded = None if noise is None else self._seeded(batch)
        return block, proposal_of(block, drafted, noise, seeded, looks_up)

    def _seeded(self, batch: ScheduleBatch) -> Tensor | None:
        """The requests whose tokens have to be those of their seed, bool `[R]`; None if none has
        to."""
        if self.target_tokens.draws(batch):
            return self.seeds.has_own(batch)
        return torch.ones_like(batch.seq_lens, dtype=torch.bool)

    def _verify(
        self,
        batch: ScheduleBatch,
        step: Step,
        block: Tensor,
        proposal: Proposal | None,
        barrier: Barrier | None,
    ) -> tuple[GenerationBatchResult, Accepted]:
        make_grammar_masks = sampling.prepare_grammar_masks(batch, block, barrier)
        result = self.target_forward(batch, block, step.positions, step.slots)
        output = result.logits_output
        tokens = self.target_tokens(
            batch, output, block, step.positions, make_grammar_masks, proposal
        )
        accepted = self.accept(self._mask_unacceptable(batch, step, block), tokens)
        self.target_tokens.penalties.commit(batch, accepted.tokens, accepted.lengths)
        if output.sampling_mask_output is not None:
            sampling.keep_accepted_masks(output.sampling_mask_output, batch.sampling_info, accepted)
        if batch.return_logprob:
            sampling.compute_spec_logprobs(
                batch, output, accepted.tokens.flatten(), chain_stride=step.width
            )
        if self.rollback is not None and not self.target_forward.is_plain_decoding(step.width):
            # Before the new lengths are published: the next forward reads these states.
            due = checkpoints_due(batch, step.seq_lens, accepted.lengths)
            self.rollback.commit(accepted.lengths, due)
        return result, accepted

    def _mask_unacceptable(self, batch: ScheduleBatch, step: Step, block: Tensor) -> Tensor:
        """Return the block with -1 for drafts that must not be accepted: those of requests that
        take one token per step, those without a slot, and those in a slot that the next bonus token
        needs."""
        single = self.target_tokens.single_token_mask(batch, step.takes_one_token)
        if single is not None:
            block = block.masked_fill(single[:, None], -1)
        if step.ends is not None:
            block = block.masked_fill(step.positions >= step.ends[:, None] - 1, -1)
        return block

    def _commit(self, batch: ScheduleBatch, step: Step, output: Any, accepted: Accepted) -> None:
        """Pass the hidden states of the committed tokens (the old bonus token and the accepted
        drafts) to the drafter."""
        # A padded batch has more rows than the block.
        hidden = output.hidden_states[: step.positions.numel()]
        replace_hidden_states(batch, output)
        if step.width == 1:
            rids = [request.rid for request in batch.reqs]
            self._pending_context.add(rids, hidden, step.positions, step.slots)
            return
        committed = self._offsets[: step.width] < accepted.lengths[:, None]
        self.drafter.absorb(
            hidden, step.positions.flatten(), step.slots.flatten(), committed=committed.flatten()
        )

    def _run_host_copies(self, slots: Tensor) -> None:
        """Copies of draft K/V from and to host memory, before a forward writes to these slots."""
        tier = self.host_tier
        if tier is not None and tier.run_copies(self._pending_context.absorb, slots):
            self.widths.clock.restart_step()

    def stop_clocks(self) -> None:
        """Stop the clocks: what runs next is no decode step."""
        self.widths.clock.drop_step()
        self.figures.times.drop_pause()

    def _idle(self, publish: Publish) -> GenerationBatchResult:
        empty = self._offsets[:0]
        publish(empty)
        return GenerationBatchResult(
            logits_output=None,
            next_token_ids=empty,
            accept_lens=empty.int(),
            cap_lens=empty.int(),
            new_seq_lens=empty,
            next_draft_input=DraftInput.create_idle_input(device=empty.device),
            speculative_num_draft_tokens=self.verify_block,
            can_run_cuda_graph=False,
        )

    def take_over(self, batch: ScheduleBatch) -> None:
        """Take in requests whose prompts another server has computed, and whose draft K/V has
        arrived. Their first tokens are the batch's bonus tokens."""
        arrived = batch.spec_info
        # If no request ran before, the pause is not one between steps.
        self.stop_clocks()
        self.seeds.note(batch)
        self.target_tokens.penalties.commit(batch, arrived.bonus_tokens[:, None])
        if self.lookup is not None:
            write_texts_taken_over(batch, self.lookup)
        batch.spec_info = draft_input(arrived.bonus_tokens, batch.seq_lens, in_flight=0)
        batch.spec_info.future_indices = arrived.future_indices

    def learn(self, steps: Sequence[RequestStep], width: int, accepted: Mapping[str, int]) -> None:
        """Take in the outcome of a step of that width.

        Args:
            steps: what live requests keep of it.
            accepted: accepted drafts of each live request that takes drafts.
        """
        self.figures.add(steps)
        with self.figures.times.phase("learn_width"):
            self.widths.observe(width, accepted)

    def clear(self) -> None:
        """Forget all context: SGLang empties its pools."""
        clear(self.drafter.groups)
        self._pending_context.clear()
        if self.host_tier is not None:
            self.host_tier.clear()
