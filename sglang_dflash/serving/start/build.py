"""Our worker, made while SGLang starts.

SGLang constructs its worker before it sizes the pools, calls `alloc_memory_pool` when they are
there, and `init_cuda_graphs` when it has captured the target's. So the parts are made in three
steps: `_reserve` before the sizing, `_allocate` what lies beside the pools, `_build` the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.forward_batch_info import get_server_return_hidden_states_mode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from sglang_dflash.common.log import Log
from sglang_dflash.drafting.drafter import Drafter, Proposer
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.lookup import Lookup
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.patches.patch import install_late
from sglang_dflash.serving.gpu.graphs import graphed
from sglang_dflash.serving.kv_transfer.disaggregation import DraftKVPages
from sglang_dflash.serving.kv_transfer.host_tier import HostTier
from sglang_dflash.serving.metrics import server_info
from sglang_dflash.serving.metrics.figures import Figures
from sglang_dflash.serving.metrics.labels import metric_labels
from sglang_dflash.serving.patches import WORKER_PATCHES
from sglang_dflash.serving.start import flags, memory
from sglang_dflash.serving.start.decide import make_plan
from sglang_dflash.serving.start.one_line_errors import ends_the_server
from sglang_dflash.serving.start.plan import Plan
from sglang_dflash.serving.start.target_head import target_head
from sglang_dflash.serving.step import sampling
from sglang_dflash.serving.step.batch import GenerationBatchResult
from sglang_dflash.serving.step.penalties import BlockPenalties
from sglang_dflash.serving.step.seeded_sampling import warm_up
from sglang_dflash.serving.step.seeds import Seeds
from sglang_dflash.serving.step.target_forward import extend_index_buffers, target_forward
from sglang_dflash.serving.step.target_tokens import TargetTokens
from sglang_dflash.serving.step.width import StepClock, StepWidths
from sglang_dflash.serving.step.worker import DFlashWorker

logger = Log(__name__)


@dataclass(frozen=True)
class Allocated:
    """The parts beside SGLang's pools.

    Attributes:
        drafter: with its caches and attention.
        pages: the draft KV caches, as other servers send them.
        host_tier: of draft K/V in host memory; None without a hierarchical cache.
        carried: requests that the rings are for.
        admitted: requests that attention is made for.
        req_to_token: int32 `[rows, positions]`, SGLang's request-to-token table.
    """

    drafter: Proposer
    pages: DraftKVPages
    host_tier: HostTier | None
    carried: int
    admitted: int
    req_to_token: Tensor


class DFlashSpecWorker(BaseSpecWorker):
    """The worker class that SGLang constructs and calls. Once built, each step goes to `dflash`.

    Attributes:
        dflash: the worker, after `init_cuda_graphs`.
    """

    dflash: DFlashWorker

    def __init__(
        self, server_args: Any, target_worker: Any, load_draft: Callable[..., DraftModel]
    ) -> None:
        """Plan the drafter, before SGLang sizes its pools.

        Args:
            load_draft: called with `dtype`, `device`, `tp` and `ops`.
        """
        super().__init__()
        # The drafter is not a ModelRunner.
        self._draft_worker = None
        self._target_worker, self._names = target_worker, flags.names(server_args)
        with ends_the_server(self._names):
            install_late(WORKER_PATCHES, "its DFLASH worker")
            keep_last_hidden_states(target_worker.model_runner.model)
            self._reserve(make_plan(server_args, target_worker, load_draft))

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        allocator = token_to_kv_pool_allocator
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, allocator)
        with ends_the_server(self._names):
            self._allocated = self._allocate(req_to_token_pool, allocator)

    def init_attention_backends(self) -> None:
        """Called when the target has its backends, and before its graphs are captured."""
        super().init_attention_backends()
        runner = self._target_worker.model_runner
        extend_index_buffers(runner.attn_backend, self._plan.options.verify_block)

    def init_cuda_graphs(self) -> None:
        with ends_the_server(self._names):
            warm_up(self._plan.device, self._plan.model.config.vocab_size)
            self.dflash = self._build(self._allocated)
        logger.info("serves: %s", server_info.set_up(self.report()))
        logger.info("set-up: %s", self.dflash.figures.describe())

    def _reserve(self, plan: Plan) -> None:
        """Tell SGLang's sizing what to leave for the drafter. Raises ConfigError."""
        runner = self._target_worker.model_runner
        reservation = memory.draft_reservation(plan, runner.model_config)
        memory.note_reservation(runner, reservation)
        self._plan, self._memory = plan, reservation.needed
        self._warnings = plan.warnings(self._names)
        for warning in self._warnings:
            logger.warning("%s", warning)
        sampling.warn_of_simulation()

    def _allocate(self, request_pool: Any, allocator: Any) -> Allocated:
        """Make what lies beside the pools that SGLang has made.

        Args:
            request_pool: SGLang's `ReqToTokenPool`.
            allocator: SGLang's, of target slots.

        Raises:
            ConfigError: the pool is too small for the block.
            RuntimeError: SGLang sized it without what `_reserve` has told.
            SelfCheckFailed: an operation differs from torch's.
        """
        plan, runner = self._plan, self._target_worker.model_runner
        plan.options.check_room(allocator.size)
        req_to_token = request_pool.req_to_token
        admitted = min(request_pool.size, plan.max_running)
        # If sliding layers have a pool of their own, `size` is the smaller one's.
        tokens = allocator.size_full
        # Recurrent states may let fewer run than --max-running-requests.
        carried = memory.carried_by(runner)
        slots = tokens + allocator.page_size
        groups = plan.groups(tokens, slots, admitted, req_to_token.shape[1], carried)
        if plan.is_checked:
            plan.check(groups, admitted)
        host_tier = None
        if plan.hierarchical:
            host_tier = HostTier(groups, carried, sends=plan.disaggregated)
            host_tier.attach(allocator)
        make = plan.extension.make_drafter or Drafter
        head = target_head(runner.model, plan.model.tp)
        drafter = make(plan.model, head, groups, plan.options)
        pages = DraftKVPages(groups)
        return Allocated(drafter, pages, host_tier, carried, admitted, req_to_token)

    def _build(self, allocated: Allocated) -> DFlashWorker:
        """The worker. Raises SelfCheckFailed if a recorded step differs from an eager one."""
        plan, target_worker = self._plan, self._target_worker
        block, runner = plan.options.verify_block, target_worker.model_runner
        # Before draft steps are recorded, which is left out if memory is short: a worker with
        # several widths needs all of the target's graphs.
        forward = target_forward(target_worker, plan.policy.widths, plan.device)
        drafter, req_to_token = self._recorded(allocated), allocated.req_to_token
        lookup, vocab_size = None, plan.model.config.vocab_size
        if plan.options.looks_up:
            ops, counters = plan.model.ops, drafter.counters
            lookup = Lookup(req_to_token, ops, block, vocab_size, counters)
        if plan.rollback is not None:
            plan.rollback.warm_up()
            if plan.is_checked:
                plan.rollback.check()
        ranks = sampling.Ranks(get_dp_tp_group())
        penalties = BlockPenalties(len(req_to_token), block, plan.device, plan.model.ops)
        widths = StepWidths(plan.policy, plan.model.tp, StepClock(plan.device))
        fused = sampling_ops(plan.model.ops, runner.sampler)
        target_tokens = TargetTokens(runner.sampler, ranks, penalties, fused)
        target_tokens.warm_up(vocab_size, plan.model.head.candidates, plan.device)
        return DFlashWorker(
            verify_block=block,
            carried=allocated.carried,
            req_to_token=req_to_token,
            widths=widths,
            drafter=drafter,
            target_forward=forward,
            target_tokens=target_tokens,
            accept=sampling.accept_rule(block, plan.model.ops.accept),
            rollback=plan.rollback,
            ranks=ranks,
            lookup=lookup,
            host_tier=allocated.host_tier,
            most_waiting_steps=plan.most_waiting_steps,
            seeds=Seeds(len(req_to_token), target_worker.random_seed, plan.device),
            figures=self._figures(allocated, drafter, lookup, widths),
            observer=plan.extension.observer,
        )

    def _recorded(self, allocated: Allocated) -> Proposer:
        """The drafter with its steps recorded, if the plan says so and they can be."""
        plan, eager = self._plan, allocated.drafter
        if plan.recorder is None:
            return eager
        table, admitted = allocated.req_to_token, allocated.admitted
        # A step of width 1 drafts nothing.
        widths = [width for width in plan.policy.widths if width > 1]
        drafter = graphed(eager, plan.recorder(), table, admitted, plan.is_checked, widths)
        if drafter is eager:
            memory.note_eager_steps(self._target_worker.model_runner.kv_cache_configurator)
        return drafter

    def _figures(
        self, allocated: Allocated, drafter: Proposer, lookup: Lookup | None, widths: StepWidths
    ) -> Figures:
        plan, runner = self._plan, self._target_worker.model_runner
        return Figures(
            worker=f"{DFlashWorker.__module__}.{DFlashWorker.__qualname__}",
            attention=plan.attention,
            memory=self._memory.as_report(),
            context_length=runner.model_config.context_len,
            simulated=sampling.simulated_acceptance_length(),
            model=plan.model,
            options=plan.options,
            drafter=drafter,
            lookup=lookup,
            host_tier=allocated.host_tier,
            pages=allocated.pages,
            rollback=plan.rollback,
            policy=widths.policy,
            warnings=self._warnings,
            width_steps=widths.steps,
            labels=metric_labels(),
        )

    @property
    def draft_model(self) -> DraftModel:
        """The draft model, for `serving/draft_weights/updates.py`."""
        return self._plan.model

    def record_again(self) -> None:
        """Record draft steps anew, if they are recorded: weights of the target have moved."""
        drafter = self.dflash.drafter
        if isinstance(drafter, GraphedDrafter):
            drafter.record_again()

    @property
    def primary_draft_kv_pool(self) -> DraftKVPages:
        """The draft KV caches, for prefill/decode disaggregation."""
        return self._allocated.pages

    @property
    def weight_load_time(self) -> float:
        return self._plan.load_seconds

    @property
    def block_penalties(self) -> BlockPenalties:
        """Penalties of the positions of a block; `serving/step/penalty_counts.py` counts for
        them."""
        return self.dflash.target_tokens.penalties

    def report(self) -> dict[str, Any]:
        """Return the figures that /server_info shows."""
        return self.dflash.figures.report()

    def clear_cache_pool(self) -> None:
        self.dflash.clear()

    def forward_batch_generation(self, *args: Any, **kwargs: Any) -> GenerationBatchResult:
        """A scheduler step."""
        return self.dflash.forward_batch_generation(*args, **kwargs)


# -- of the target and its server ------------------------------------------------------------------


def keep_last_hidden_states(model: Any) -> None:
    """Let the target return its last layer's hidden states beside those that the draft reads, if
    requests may ask for them. To be called before its graphs are captured."""
    if not get_server_return_hidden_states_mode().need_capture():
        return
    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            module.keep_last_hidden_states = True


def sampling_ops(ops: TorchOps, sampler: Any) -> TorchOps | None:
    """Return the operations that draw samples; None for SGLang's sampler: under deterministic
    inference, which promises SGLang's own tokens, and with a sampler of the operator's own
    (`register_sampler_backend`)."""
    return ops if type(sampler) is Sampler and not sampler.enable_deterministic else None
