"""Our worker, made while SGLang starts.

SGLang constructs its worker before it sizes the pools, calls `alloc_memory_pool` when they are
there, and `init_cuda_graphs` when it has captured the target's. So the parts are made in three
steps: `reserve` before the sizing, `allocate` what lies beside the pools, `build` the worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_dflash.drafting.attention.backend import choose_attention
from sglang_dflash.drafting.drafter import Drafter, Proposer
from sglang_dflash.drafting.graphs import Recorder
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.facts.sizes import DraftMemory
from sglang_dflash.serving.gpu.backends import ATTENTION, asked_attention, draft_ops
from sglang_dflash.serving.gpu.graphs import cuda_recorder, graphed
from sglang_dflash.serving.hybrid.rollback import Rollback, make_rollback
from sglang_dflash.serving.show.counts import DraftWatch
from sglang_dflash.serving.show.figures import Figures
from sglang_dflash.serving.start import draft_setup, flags, memory
from sglang_dflash.serving.start.draft_setup import DraftSetup
from sglang_dflash.serving.start.refusal import ends_the_server
from sglang_dflash.serving.step import sampling
from sglang_dflash.serving.step.batch import GenerationBatchResult
from sglang_dflash.serving.step.extension import Extension, load_extension
from sglang_dflash.serving.step.penalties import BlockPenalties
from sglang_dflash.serving.step.prefill import PrefillStep
from sglang_dflash.serving.step.target_forward import target_forward
from sglang_dflash.serving.step.target_tokens import TargetTokens
from sglang_dflash.serving.step.width import StepClock, StepWidths
from sglang_dflash.serving.step.worker import DFlashWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reserved:
    """What is known before SGLang sizes its pools.

    Attributes:
        setup: what the drafter is made of.
        asked: the options as they were given.
        attention: the name of the draft attention backend.
        policy: of verify widths.
        recorder: makes what records the drafter's steps; None if none are recorded.
        memory: what the sizing leaves for the drafter.
        self_check: whether operations and recorded steps are compared with torch's.
        load_seconds: that loading the draft took.
    """

    setup: DraftSetup
    asked: Options
    attention: str
    extension: Extension
    policy: WidthPolicy
    rollback: Rollback | None
    recorder: Callable[[], Recorder] | None
    memory: DraftMemory
    self_check: bool
    load_seconds: float


def reserve(
    server_args: Any, target_worker: Any, load_draft: Callable[..., DraftModel]
) -> Reserved:
    """Load the draft, and tell SGLang's sizing what to leave for it.

    Args:
        load_draft: called with `dtype`, `device`, `tp` and `ops`.

    Raises:
        ConfigError: a setting does not fit the draft.
    """
    ours = flags.ServerFlags.of(server_args)
    settings = resolving_view(server_args)
    asked = flags.options(server_args, settings)
    runner = target_worker.model_runner
    device, tp = torch.device(runner.device), draft_setup.tensor_parallel()
    began = time.perf_counter()
    model = load_draft(dtype=runner.dtype, device=device, tp=tp, ops=draft_ops(device))
    load_seconds = time.perf_counter() - began
    options = asked.resolve(model.config)
    extension = load_extension(ours.extension, target_worker)
    if extension.width_policy is None:
        policy = flags.width_policy(server_args, settings, options.block_size)
    else:
        policy = extension.width_policy(options.block_size)
    attention = choose_attention(asked_attention(server_args), model.config, device, ATTENTION)
    recorder = extension.recorder
    if recorder is None and ours.draft_graphs == "auto":
        recorder = cuda_recorder(device, ATTENTION[attention].capabilities.capturable)
    rollback = make_rollback(options.recurrent_rollback, runner)
    setup = DraftSetup(
        model, options, ATTENTION[attention], tp, device,
        draft_setup.draft_kv_dtype(runner.dtype), server_args.max_running_requests or 48,
    )  # fmt: skip
    replay = rollback is not None and rollback.name == "replay"
    plan = memory.plan_memory(
        setup, runner.model_config, recorder is not None, replay, policy.widths[:-1]
    )
    memory.hand_plan_to_sizing(runner, plan)
    context = runner.model_config.context_len
    for warning in options.warnings(model.config, context, flags.names(server_args)):
        logger.warning("DFLASH: %s", warning)
    sampling.warn_of_simulation()
    return Reserved(
        setup, asked, attention, extension, policy, rollback, recorder, plan.needed,
        ours.self_check == "on", load_seconds,
    )  # fmt: skip


def allocate(reserved: Reserved, runner: Any, requests: Any, allocator: Any) -> Proposer:
    """The drafter, with its cache and attention.

    Args:
        runner: the target's.
        requests, allocator: SGLang's request pool and KV allocator.

    Raises:
        ConfigError: the pool is too small for the block.
        SelfCheckFailed: an operation differs from torch's.
    """
    setup = reserved.setup
    reserved.asked.check_room(setup.options, context=None, kv_tokens=allocator.size)
    rows, positions = requests.size, requests.req_to_token.shape[1]
    cache = setup.cache(allocator.size + allocator.page_size, rows, memory.is_bounded(runner))
    attention = setup.attention(cache, rows, positions)
    if reserved.self_check:
        setup.check(attention, cache)
    head = draft_setup.target_head(runner.model)
    make = reserved.extension.make_drafter or Drafter
    return make(setup.model, head, cache, setup.options, attention)


def build(
    reserved: Reserved, drafter: Proposer, target_worker: Any, req_to_token: torch.Tensor
) -> DFlashWorker:
    """The worker.

    Args:
        req_to_token: int32 `[rows, positions]`, SGLang's request-to-token table.

    Raises:
        SelfCheckFailed: a recorded step differs from an eager one.
    """
    setup, policy = reserved.setup, reserved.policy
    block = setup.options.block_size
    target = target_forward(target_worker, policy.widths, setup.device)
    if reserved.recorder is not None:
        drafter = graphed(drafter, reserved.recorder(), req_to_token, reserved.self_check)
    runner, ranks = target_worker.model_runner, sampling.Ranks(get_dp_tp_group())
    penalties = BlockPenalties(len(req_to_token), block, setup.device)
    prefill = PrefillStep(target_worker, drafter, req_to_token, setup.options, ranks, setup.running)
    widths = StepWidths(policy, setup.tp, StepClock(setup.device))
    watch = DraftWatch(drafter.counters, drafter.cache.num_entries, speaks=setup.tp.rank == 0)
    figures = Figures(
        worker=f"{DFlashWorker.__module__}.{DFlashWorker.__qualname__}",
        ranks=setup.tp.size,
        attention=reserved.attention,
        memory={**reserved.memory._asdict(), "total": reserved.memory.total},
        context_length=runner.model_config.context_len,
        simulated=sampling.simulated_acceptance_length(),
        model=setup.model,
        options=setup.options,
        drafter=drafter,
        rollback=reserved.rollback,
        policy=policy,
        seeds=prefill.ignored_seeds,
        watch=watch,
        width_steps=widths.steps,
        labels=draft_setup.metric_labels(),
    )
    logger.info("DFLASH: sglang-dflash serves: %s", figures.describe())
    return DFlashWorker(
        block_size=block,
        req_to_token=req_to_token,
        widths=widths,
        drafter=drafter,
        prefill=prefill,
        target=target,
        target_tokens=TargetTokens(runner.sampler, ranks, penalties),
        accept=sampling.accept_rule(block, setup.model.ops.accept),
        rollback=reserved.rollback,
        ranks=ranks,
        figures=figures,
        observer=reserved.extension.observer,
    )


class DFlashSpecWorker(BaseSpecWorker):
    """What SGLang constructs and calls. Once built, each step goes to `dflash`.

    Attributes:
        dflash: the worker.
    """

    dflash: DFlashWorker
    _drafter: Proposer

    def __init__(
        self,
        *,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
        load_draft: Callable[..., DraftModel],
    ) -> None:
        """`load_draft`: see `reserve`. The rest comes from SGLang."""
        super().__init__()
        del gpu_id, nccl_port
        self._target_worker, self._names = target_worker, flags.names(server_args)
        with ends_the_server(self._names):
            self._reserved = reserve(server_args, target_worker, load_draft)

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        allocator = token_to_kv_pool_allocator
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, allocator)
        runner = self.target_worker.model_runner
        with ends_the_server(self._names):
            self._drafter = allocate(self._reserved, runner, req_to_token_pool, allocator)

    def init_cuda_graphs(self) -> None:
        table = self.req_to_token_pool.req_to_token
        with ends_the_server(self._names):
            self.dflash = build(self._reserved, self._drafter, self.target_worker, table)

    @property
    def draft_worker(self) -> None:
        """There is none: the drafter is no ModelRunner."""
        return None

    def _draft_model_runners(self) -> tuple[Any, ...]:
        return ()

    @property
    def weight_load_time(self) -> float:
        return self._reserved.load_seconds

    @property
    def block_penalties(self) -> BlockPenalties:
        """For `repairs/penalties.py`, which counts what it remembers."""
        return self.dflash.target_tokens.penalties

    def report(self) -> dict[str, Any]:
        """What /server_info shows."""
        return self.dflash.figures.report()

    def clear_cache_pool(self) -> None:
        self.dflash.clear()

    def forward_batch_generation(self, *args: Any, **kwargs: Any) -> GenerationBatchResult:
        """A scheduler step."""
        return self.dflash.forward_batch_generation(*args, **kwargs)
