"""The DFLASH spec worker: propose -> verify -> commit, on top of SGLang's target worker.

There is no draft ModelRunner: the drafter is a small network of ours with a cache of its own, keyed by the target's KV slots.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.core.acceptance import Accepted
from sglang_dflash.core.attention.reference import block_attention
from sglang_dflash.core.drafter import Drafter, TargetHead
from sglang_dflash.core.kv_cache import DraftKVCache, IdentityDraftKVCache
from sglang_dflash.core.model import DraftModel
from sglang_dflash.core.options import Options
from sglang_dflash.core.parallel import argmax_of_shards
from sglang_dflash.serving import compat, memory
from sglang_dflash.serving.metrics import AcceptanceCounts, PhaseTimes, PrometheusCounters
from sglang_dflash.serving.prompt import PromptTokens, lengths_before_drafting, missing_tails
from sglang_dflash.serving.recurrent import checkpoints_due, make_rollback
from sglang_dflash.serving.target_tokens import TargetTokens

logger = logging.getLogger(__name__)


class Step(NamedTuple):
    """One decode step's requests: request rows and committed lengths int64 `[R]`, block positions and KV slots int64 `[R, B]`."""

    rows: Tensor
    seq_lens: Tensor
    positions: Tensor
    slots: Tensor


class DFlashWorker(compat.BaseSpecWorker):
    """Serves `--speculative-algorithm DFLASH`, overlap scheduling on or off."""

    def __init__(
        self,
        *,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
        load_draft: Callable[..., DraftModel],
        options: Options,
    ) -> None:
        super().__init__()
        del gpu_id, nccl_port
        self._target_worker = target_worker
        runner = target_worker.model_runner
        self.device = torch.device(runner.device)
        began = time.perf_counter()
        self._tp = compat.tensor_parallel()
        model = load_draft(dtype=runner.dtype, device=self.device, tp=self._tp)
        self._load_seconds = time.perf_counter() - began
        self.config: DraftConfig = model.config
        self.options = options.resolve(self.config)
        assert self.options.block_size is not None
        self.block_size = self.speculative_num_draft_tokens = self.options.block_size
        self.speculative_num_steps = 1
        self._accept = compat.accept_rule(self.block_size)
        if compat.simulated_acceptance() is not None:
            logger.warning(
                "DFLASH: SGLANG_SIMULATE_ACC_LEN is set: steps commit so many tokens, right or wrong"
            )
        self._offsets = torch.arange(self.block_size, device=self.device)
        self._model, self._kv_dtype = model, compat.draft_kv_dtype(runner.dtype)
        self._max_running_requests = server_args.max_running_requests or 48
        if self.options.window is not None:
            token_bytes = math.prod(model.kv_shape) * self._kv_dtype.itemsize
            memory.draft_kv.bounded_bytes = (
                self.options.draft_kv_slots(self._max_running_requests) * token_bytes
            )
        labels = compat.metric_labels()
        prometheus = None if labels is None else PrometheusCounters(labels, self.block_size)
        self.counts, self.times = AcceptanceCounts(self.block_size, prometheus), PhaseTimes()
        self.rollback = make_rollback(self.options.recurrent_rollback, runner, self.block_size)
        self._warn_of_long_contexts(runner.model_config.context_len)

    def _warn_of_long_contexts(self, served: int) -> None:
        trained = self.config.max_position_embeddings
        if served > trained:
            logger.warning(
                "DFLASH: the target serves contexts of %d tokens, the draft was made for %d (max_position_embeddings): beyond that "
                "outputs stay exact and acceptance may fall",
                served,
                trained,
            )

    # -- the scheduler's start-up calls, in their order ---------------------------------------------------------------

    @property
    def draft_worker(self) -> None:
        """There is none: the drafter is no ModelRunner."""
        return None

    def _draft_model_runners(self) -> tuple[Any, ...]:
        return ()

    @property
    def weight_load_time(self) -> float:
        return self._load_seconds

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        cache = self._draft_kv_cache(
            token_to_kv_pool_allocator.size + token_to_kv_pool_allocator.page_size
        )
        memory.draft_kv.bounded_bytes = 0
        self.drafter = Drafter(
            self._model, self._target_head(), cache, self.options, block_attention("torch")
        )
        self.target_tokens = TargetTokens(self.target_worker.model_runner.sampler)
        logger.info("DFLASH: %s", self.describe())

    def _draft_kv_cache(self, target_slots: int) -> DraftKVCache:
        shape, dtype = self._model.kv_shape, self._kv_dtype
        if self.options.window is not None:
            slots = self.options.draft_kv_slots(self._max_running_requests)
            # A bound that the target's pool does not exceed bounds nothing.
            if memory.draft_kv.is_bounded and slots < target_slots:
                return DraftKVCache(slots, target_slots, shape, dtype, self.device)
        return IdentityDraftKVCache(target_slots, shape, dtype, self.device)

    def _target_head(self) -> TargetHead:
        target = self.target_worker.model_runner.model
        # Adapters are the target's: the drafter is one for all requests, and its tokens are not laid out as the batch's.
        embed, lm_head = map(
            compat.unwrap_lora_layer, (target.get_input_embeddings(), target.lm_head)
        )
        weight, first_id = compat.vocabulary_shard(lm_head)
        return TargetHead(
            embed=embed,
            argmax=lambda hidden: argmax_of_shards(hidden @ weight.T, first_id, self._tp),
        )

    def clear_cache_pool(self) -> None:
        self.drafter.cache.clear()

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        self.counts.add(num_correct_drafts_per_req)

    def describe(self) -> dict[str, Any]:
        """The set-up, as the log and /server_info show it."""
        return {
            "worker": f"{type(self).__module__}.{type(self).__qualname__}",
            "tensor_parallel": self._tp.size,
            "block_size": self.block_size,
            "window": self.options.window,
            "sinks": self.options.sinks,
            "draft_kv_slots": self.drafter.cache.num_slots,
            "draft_kv_is_bounded": not self.drafter.cache.keeps_everything,
            "recompute_tail": self.options.recompute_tail,
            "recurrent_rollback": None if self.rollback is None else self.rollback.name,
            "recurrent_scratch_bytes": None
            if self.rollback is None
            else self.rollback.scratch_bytes,
            "draft_kv_bytes": self.drafter.cache.nbytes,
            "draft_kv_dtype": str(self._kv_dtype).removeprefix("torch."),
            "draft_attention": "torch",
            "simulated_acceptance": compat.simulated_acceptance(),
        }

    def report(self) -> dict[str, Any]:
        """`describe`, and how it is going."""
        live_share = round(self.drafter.cache.live_share(), 4)
        return {
            **self.describe(),
            "draft_kv_live_share": live_share,
            **self.counts.report(),
            **self.times.report(),
        }

    # -- the step ------------------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: compat.ScheduleBatch,
        on_publish: Callable[[Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> compat.GenerationBatchResult:
        """One scheduler step. `on_publish` takes the new committed lengths as soon as they are known."""
        publish = on_publish or (lambda _: None)
        if batch.forward_mode.is_idle():
            return self._idle(publish)
        if batch.forward_mode.is_extend():
            return self._prefill(batch, publish, grammar_barrier, pp_proxy_tensors)
        return self._decode(batch, publish, grammar_barrier)

    def _decode(
        self,
        batch: compat.ScheduleBatch,
        publish: Callable[[Tensor], None],
        grammar_barrier: Callable[[], None] | None,
    ) -> compat.GenerationBatchResult:
        with self.times.of("propose"):
            step = self._next_step(batch)
            block = self._propose(batch, step)
        with self.times.of("verify"):
            target, accepted = self._verify(batch, step, block, grammar_barrier)
            if self.rollback is not None:
                # Before anybody hears of the new lengths: the next forward reads these states.
                self.rollback.commit(
                    accepted.lengths, checkpoints_due(batch, step.seq_lens, accepted.lengths)
                )
            new_seq_lens = step.seq_lens + accepted.lengths
            publish(new_seq_lens)
        with self.times.of("commit"):
            self._commit(step, target.logits_output, accepted)
        return compat.GenerationBatchResult(
            logits_output=target.logits_output,
            next_token_ids=accepted.tokens.flatten(),
            accept_lens=accepted.lengths.int(),
            new_seq_lens=new_seq_lens,
            next_draft_input=compat.draft_input(accepted.bonus, new_seq_lens),
            speculative_num_draft_tokens=self.block_size,
            can_run_cuda_graph=target.can_run_cuda_graph,
        )

    def _next_step(self, batch: compat.ScheduleBatch) -> Step:
        compat.hold_for_this_stream(batch.seq_lens)
        rows, seq_lens = batch.req_pool_indices.long(), batch.seq_lens.long()
        positions = seq_lens[:, None] + self._offsets
        return Step(
            rows,
            seq_lens,
            positions,
            self.req_to_token_pool.req_to_token[rows[:, None], positions].long(),
        )

    def _propose(self, batch: compat.ScheduleBatch, step: Step) -> Tensor:
        lengths = (
            batch.seq_lens_cpu
            if batch.seq_lens_cpu is not None
            else batch.spec_info.nxt_kv_lens_cpu
        )
        positions = self.drafter.visible_context(step.seq_lens, longest=int(lengths.max()))
        slots = self.req_to_token_pool.req_to_token[step.rows[:, None], positions].long()
        return self.drafter.propose(
            batch.spec_info.bonus_tokens.long(), step.seq_lens, positions, slots
        )

    def _verify(
        self,
        batch: compat.ScheduleBatch,
        step: Step,
        block: Tensor,
        grammar_barrier: Callable[[], None] | None,
    ) -> tuple[compat.GenerationBatchResult, Accepted]:
        forward_batch = compat.verify_batch(
            batch, self.target_worker, block, step.positions, step.slots
        )
        target = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        output = target.logits_output
        said = self.target_tokens(
            batch, output.next_token_logits, block, step.positions, grammar_barrier
        )
        alone = self.target_tokens.one_at_a_time(batch)
        if alone is not None:
            block = block.masked_fill(alone[:, None], -1)
        accepted = self._accept(block, said)
        if batch.return_logprob:
            compat.compute_spec_logprobs(
                batch, output, accepted.tokens.flatten(), chain_stride=self.block_size
            )
        return target, accepted

    def _commit(self, step: Step, output: compat.LogitsProcessorOutput, accepted: Accepted) -> None:
        """Hand the hidden states of the committed tokens (the old bonus and the accepted drafts) to the drafter."""
        committed = self._offsets < accepted.lengths[:, None]
        self.drafter.absorb(
            output.hidden_states,
            step.positions.flatten(),
            step.slots.flatten(),
            keep=committed.flatten(),
        )
        # Large, and read by nobody else: the overlap loop would copy it to the host.
        output.hidden_states = None

    def _prefill(
        self,
        batch: compat.ScheduleBatch,
        publish: Callable[[Tensor], None],
        grammar_barrier: Callable[[], None] | None,
        pp_proxy_tensors: Any,
    ) -> compat.GenerationBatchResult:
        if grammar_barrier is not None and batch.has_grammar and batch.forward_mode.is_mixed():
            # Decoding requests take part: the target samples their next token under grammars that must have seen their last ones.
            grammar_barrier()
        again = self._lost_of_prefix(batch)
        with compat.extended_backwards(batch, again):
            result = self.target_worker.forward_batch_generation(
                batch,
                pp_proxy_tensors=pp_proxy_tensors,
                capture_hidden_mode=compat.CaptureHiddenMode.FULL,
            )
        result.new_seq_lens = batch.seq_lens
        publish(result.new_seq_lens)
        self._absorb_prompt(batch, again, result.logits_output.hidden_states)
        result.logits_output.hidden_states = None
        result.next_draft_input = compat.draft_input(result.next_token_ids, batch.seq_lens)
        return result

    def _lost_of_prefix(self, batch: compat.ScheduleBatch) -> list[int]:
        """How many cached tokens before each request's new ones the target computes again, for their hidden states."""
        if (
            not self.options.recompute_tail
            or self.drafter.cache.keeps_everything
            or not compat.can_extend_backwards(batch)
        ):
            return [0] * len(batch.prefix_lens)
        table = self.req_to_token_pool.req_to_token
        return missing_tails(
            batch, table, self.drafter.cache, self.options, self.options.recompute_tail
        )

    def _absorb_prompt(
        self, batch: compat.ScheduleBatch, again: list[int], features: Tensor
    ) -> None:
        """Project the prompt tokens that a draft can ever see; the target slots of the others are marked dead."""
        starts = [prefix - n for prefix, n in zip(batch.prefix_lens, again, strict=True)]
        ends = [prefix + n for prefix, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        tokens = PromptTokens.of(starts, ends, lengths_before_drafting(batch), self.options)
        rows = batch.req_pool_indices.long()[tokens.rows.to(self.device)]
        positions = tokens.positions.to(self.device)
        slots = self.req_to_token_pool.req_to_token[rows, positions].long()
        if self.drafter.cache.keeps_everything:
            self.drafter.absorb(features, positions, slots)
            return
        self.drafter.cache.forget(slots[(~tokens.seen).nonzero()[:, 0].to(self.device)])
        seen = tokens.newest_last().to(self.device)
        share = len(batch.reqs) * self.drafter.cache.num_slots // self._max_running_requests
        self.drafter.absorb(features[seen], positions[seen], slots[seen], share=share)

    def _idle(self, publish: Callable[[Tensor], None]) -> compat.GenerationBatchResult:
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        publish(nothing)
        return compat.GenerationBatchResult(
            logits_output=None,
            next_token_ids=nothing,
            accept_lens=nothing.int(),
            new_seq_lens=nothing,
            next_draft_input=compat.DraftInput.create_idle_input(device=self.device),
            speculative_num_draft_tokens=self.block_size,
            can_run_cuda_graph=False,
        )
