"""The DFLASH spec worker: propose -> verify -> commit, on SGLang's target worker.

There is no draft ModelRunner: the drafter is a small network of ours with its own cache, keyed by
the target's KV slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.attention.backend import choose_attention
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.plain_context import PlainContext
from sglang_dflash.drafting.width import FixedWidth, WidthPolicy
from sglang_dflash.facts.sizes import DraftMemory
from sglang_dflash.serving.gpu.backends import ATTENTION, draft_ops
from sglang_dflash.serving.gpu.graphs import graphed
from sglang_dflash.serving.hybrid.rollback import checkpoints_due, make_rollback
from sglang_dflash.serving.show.metrics import AcceptanceCounts, PhaseTimes, prometheus_counters
from sglang_dflash.serving.show.watch import DraftWatch
from sglang_dflash.serving.start import flags, memory
from sglang_dflash.serving.start.draft_setup import DraftSetup
from sglang_dflash.serving.start.refusal import ends_the_server
from sglang_dflash.serving.step import sampling, target_model
from sglang_dflash.serving.step.batch import (
    DraftInput,
    GenerationBatchResult,
    ScheduleBatch,
    draft_input,
    host_lengths,
    record_stream,
)
from sglang_dflash.serving.step.extension import Step, load_extension
from sglang_dflash.serving.step.penalties import BlockPenalties
from sglang_dflash.serving.step.prefill import Barrier, Prefill, Publish
from sglang_dflash.serving.step.target_forward import TargetForward, target_forward
from sglang_dflash.serving.step.target_tokens import TargetTokens
from sglang_dflash.serving.step.width import StepClock, StepWidths

logger = logging.getLogger(__name__)


class DFlashWorker(BaseSpecWorker):
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
        attention: str | None = None,
        draft_graphs: str = "off",
        self_check: bool = True,
        width_policy: Callable[[int], WidthPolicy] = FixedWidth,
        extension_path: str | None = None,
    ) -> None:
        """The rest comes from SGLang.

        Args:
            load_draft: called with `dtype`, `device`, `tp` and `ops`.
            attention: the draft attention backend; None for the best.
            draft_graphs: the value of --speculative-dflash-draft-graphs.
            self_check: whether operations and graphs are compared at start-up.
            width_policy: makes what chooses the verify widths, from the block size.
        """
        super().__init__()
        del gpu_id, nccl_port
        self._target_worker = target_worker
        runner = target_worker.model_runner
        self.device = torch.device(runner.device)
        began = time.perf_counter()
        self._tp = target_model.tensor_parallel()
        self._ranks = SpecTpSync(get_dp_tp_group())
        self._model = load_draft(
            dtype=runner.dtype, device=self.device, tp=self._tp, ops=draft_ops(self.device)
        )
        self._load_seconds = time.perf_counter() - began
        self.config, self.options = self._model.config, options.resolve(self._model.config)
        self._asked = options
        self._names = flags.names(server_args)
        self.block_size = self.speculative_num_draft_tokens = self.options.block_size
        self.speculative_num_steps = 1
        self.extension = load_extension(extension_path, target_worker)
        self.widths = self._step_widths(self.extension.width_policy or width_policy)
        self.target = TargetForward(target_worker)
        self._accept = sampling.accept_rule(self.block_size, self._model.ops.accept)
        self._attention = choose_attention(attention, self.config, self.device, ATTENTION)
        self._draft_graphs, self._self_check = draft_graphs, self_check
        sampling.warn_of_simulation()
        self._offsets = torch.arange(self.block_size, device=self.device)
        self._kv_dtype = target_model.draft_kv_dtype(runner.dtype)
        self._max_running_requests = server_args.max_running_requests or 48
        self.counts, self.times = self._counters(), PhaseTimes()
        self.counts.on_outcome = self._learn_width
        self.rollback = make_rollback(self.options.recurrent_rollback, runner)
        self._setup, self._memory = self._reserve(runner, draft_graphs)
        context = runner.model_config.context_len
        for warning in self.options.warnings(self.config, context, self._names):
            logger.warning("DFLASH: %s", warning)

    def _step_widths(self, make_policy: Callable[[int], WidthPolicy]) -> StepWidths:
        policy, clock = make_policy(self.block_size), StepClock(self.device)
        return StepWidths(policy, self._tp, target_model.metric_labels(), clock)

    def _counters(self) -> AcceptanceCounts:
        prometheus = prometheus_counters(target_model.metric_labels(), self.block_size)
        return AcceptanceCounts(self.block_size, prometheus)

    def _reserve(self, runner: Any, draft_graphs: str) -> tuple[DraftSetup, DraftMemory]:
        """What the drafter is made of, and the memory that SGLang leaves for it."""
        setup = DraftSetup(
            self._model, self.options, ATTENTION[self._attention], self._tp, self.device,
            self._kv_dtype, self._max_running_requests,
        )  # fmt: skip
        narrow = self.widths.policy.widths[:-1]
        replay = self.rollback is not None and self.rollback.name == "replay"
        plan = memory.plan_memory(setup, runner.model_config, draft_graphs, replay, narrow)
        memory.hand_plan_to_sizing(runner, plan)
        return setup, plan.needed

    # -- start-up: SGLang calls these in this order --------------------------------------------

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
        allocator = token_to_kv_pool_allocator
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, allocator)
        with ends_the_server(self._names):
            self._asked.check_room(self.options, context=None, kv_tokens=allocator.size)
        runner = self.target_worker.model_runner
        rows, positions = self.req_to_token_pool.size, self.req_to_token_pool.req_to_token.shape[1]
        setup = self._setup
        target_slots = allocator.size + allocator.page_size
        cache = setup.cache(target_slots, rows, memory.is_bounded(runner))
        attention = setup.attention(cache, rows, positions)
        if self._self_check:
            with ends_the_server(self._names):
                setup.check(attention, cache)
        head = target_model.target_head(runner.model)
        self.drafter = self.extension.make_drafter(
            self._model, head, cache, self.options, attention
        )
        self.counts.watch = DraftWatch(
            self.drafter.counters,
            target_model.metric_labels(),
            speaks=self._tp.rank == 0,
            draft_kv_entries=cache.num_entries,
        )
        # repairs/penalties.py counts what it remembers.
        table_rows = len(self.req_to_token_pool.req_to_token)
        self.block_penalties = BlockPenalties(table_rows, self.block_size, self.device)
        self.target_tokens = TargetTokens(runner.sampler, self._ranks, self.block_penalties)
        self.prefill = Prefill(
            self.target_worker, self.req_to_token_pool.req_to_token, self.options, self._ranks,
            self._max_running_requests,
        )  # fmt: skip
        logger.info("DFLASH: sglang-dflash serves: %s", self.describe())

    def init_cuda_graphs(self) -> None:
        """After the target's."""
        widths = self.widths.policy.widths
        self.target = target_forward(self.target_worker, widths, self.device)
        with ends_the_server(self._names):
            self.drafter = graphed(
                self.drafter,
                self._draft_graphs,
                self.device,
                self.req_to_token_pool.req_to_token,
                ATTENTION[self._attention].capabilities.capturable,
                self._self_check,
            )
        self.plain_context = PlainContext(self.drafter)

    def clear_cache_pool(self) -> None:
        self.drafter.cache.clear()
        self.plain_context.clear()

    def describe(self) -> dict[str, Any]:
        """The set-up, as the log and /server_info show it."""
        cache, rollback, reach = self.drafter.cache, self.rollback, self.options.reach
        return {
            "worker": f"{type(self).__module__}.{type(self).__qualname__}",
            "tensor_parallel": self._tp.size,
            "block_size": self.block_size,
            "window": reach.tokens,
            "sinks": reach.sinks,
            "draft_kv_entries": cache.num_entries,
            "draft_kv_is_bounded": cache.is_bounded,
            "recompute_tail": self.options.recompute_tail,
            "recurrent_rollback": None if rollback is None else rollback.name,
            "recurrent_scratch_bytes": None if rollback is None else rollback.scratch_bytes,
            "draft_kv_bytes": cache.nbytes,
            "draft_memory_bytes": {**self._memory._asdict(), "total": self._memory.total},
            "draft_kv_dtype": str(self._kv_dtype).removeprefix("torch."),
            "draft_attention": self._attention,
            "draft_ops": type(self._model.ops).__name__,
            **self.drafter.describe(),
            "simulated_acceptance": sampling.simulated_acceptance_length(),
            "context_length": self.target_worker.model_runner.model_config.context_len,
            "draft_max_position_embeddings": self.config.max_position_embeddings,
        }

    def report(self) -> dict[str, Any]:
        """`describe`, and the counts so far."""
        live_share = round(self.drafter.cache.live_share(), 4)
        watched = {} if self.counts.watch is None else self.counts.watch.report()
        return {
            **self.describe(),
            "draft_kv_live_share": live_share,
            **self.counts.report(),
            **watched,
            "ignored_seeds": self.prefill.ignored_seeds.found,
            **self.times.report(),
            **self.widths.policy.report(),
            **self.drafter.report(),
        }

    # -- the step ------------------------------------------------------------------------------

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
            self.widths.interrupted()
            return self._idle(publish)
        if batch.forward_mode.is_extend():
            self.widths.interrupted()
            self.plain_context.absorb()
            result = self.prefill(self.drafter, batch, publish, grammar_barrier, pp_proxy_tensors)
            self.block_penalties.commit(batch, result.next_token_ids[:, None])
            return result
        return self._decode(batch, publish, grammar_barrier)

    def _decode(
        self, batch: ScheduleBatch, publish: Publish, barrier: Barrier | None
    ) -> GenerationBatchResult:
        with self.times.of("choose_width"):
            width = self.widths.choose(batch)
        step = self._next_step(batch, width)
        self.extension.observer.before_step(batch, step)
        with self.times.of("propose"):
            block = self._propose(batch, step)
        with self.times.of("verify"), self.target.at(step.width):
            target, accepted = self._verify(batch, step, block, barrier)
            new_seq_lens = step.seq_lens + accepted.lengths
            publish(new_seq_lens)
        with self.times.of("commit"):
            self._commit(batch, step, target.logits_output, accepted)
            self.drafter.counters.send()
        self.extension.observer.after_step(batch, step, accepted, new_seq_lens)
        # The target's own result has what else the request asked for, such as routed experts.
        target.next_token_ids = accepted.tokens.flatten()
        target.accept_lens, target.new_seq_lens = accepted.lengths.int(), new_seq_lens
        target.next_draft_input = draft_input(accepted.bonus, new_seq_lens, step.width)
        target.speculative_num_draft_tokens = step.width
        return target

    def _learn_width(self, width: int, accepted: Mapping[str, int]) -> None:
        with self.times.of("learn_width"):
            self.widths.observe(width, accepted)

    def _next_step(self, batch: ScheduleBatch, width: int) -> Step:
        record_stream(batch.seq_lens)
        rows, seq_lens = batch.req_pool_indices.long(), batch.seq_lens.long()
        positions = seq_lens[:, None] + self._offsets[:width]
        return Step(rows, seq_lens, positions, self._target_slots(rows[:, None], positions))

    def _target_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """KV slots int64 of table rows at positions, broadcast against each other."""
        return self.req_to_token_pool.req_to_token[rows, positions].long()

    def _propose(self, batch: ScheduleBatch, step: Step) -> Tensor:
        """The step's tokens int64 `[R, width]`: each request's bonus token, then drafts."""
        bonus = batch.spec_info.bonus_tokens.long()
        if step.width == 1:
            return bonus[:, None]
        if self.plain_context.absorb():
            self.widths.begins_now()
        longest = int(host_lengths(batch).max())
        table = self.req_to_token_pool.req_to_token
        requests = RequestSlots(table, step.rows, step.seq_lens, longest)
        block = self.drafter.propose(bonus, requests)[:, : step.width].contiguous()
        # SGLang has no site for the drafts of its own v1 worker; this one is for choosing drafts.
        return self._ranks.sync(SpecTpSyncSite.DFLASH_SELECTOR, block)

    def _verify(
        self, batch: ScheduleBatch, step: Step, block: Tensor, barrier: Barrier | None
    ) -> tuple[GenerationBatchResult, Accepted]:
        given = batch.spec_info
        target = self.target(batch, block, step.positions, step.slots)
        output = target.logits_output
        tokens = self.target_tokens(batch, output.next_token_logits, block, step.positions, barrier)
        single = self.target_tokens.single_token_mask(batch)
        if single is not None:
            block = block.masked_fill(single[:, None], -1)
        accepted = self._accept(block, tokens)
        self.block_penalties.commit(batch, accepted.tokens, accepted.lengths)
        output.sampling_mask_output = sampling.mask_output(
            batch.sampling_info, given, output.next_token_logits, accepted
        )
        if batch.return_logprob:
            sampling.compute_spec_logprobs(
                batch, output, accepted.tokens.flatten(), chain_stride=step.width
            )
        if self.rollback is not None and not self.target.decodes(step.width):
            # Before the new lengths are published: the next forward reads these states.
            due = checkpoints_due(batch, step.seq_lens, accepted.lengths)
            self.rollback.commit(accepted.lengths, due)
        return target, accepted

    def _commit(self, batch: ScheduleBatch, step: Step, output: Any, accepted: Accepted) -> None:
        """Pass the hidden states of the committed tokens (the old bonus token and the accepted
        drafts) to the drafter."""
        # A batch that was padded has rows after the block's.
        hidden = output.hidden_states[: step.positions.numel()]
        # Large, and no longer needed: the overlap loop would copy it to the host.
        output.hidden_states = None
        if step.width == 1:
            requests = [request.rid for request in batch.reqs]
            self.plain_context.add(requests, hidden, step.positions, step.slots)
            return
        committed = self._offsets[: step.width] < accepted.lengths[:, None]
        self.drafter.absorb(
            hidden, step.positions.flatten(), step.slots.flatten(), keep=committed.flatten()
        )

    def _idle(self, publish: Publish) -> GenerationBatchResult:
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        publish(empty)
        return GenerationBatchResult(
            logits_output=None,
            next_token_ids=empty,
            accept_lens=empty.int(),
            new_seq_lens=empty,
            next_draft_input=DraftInput.create_idle_input(device=self.device),
            speculative_num_draft_tokens=self.block_size,
            can_run_cuda_graph=False,
        )
