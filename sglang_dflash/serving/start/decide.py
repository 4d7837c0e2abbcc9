"""A server's `Plan`, decided from its flags, the draft and the loaded target."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_dflash.common.log import Log
from sglang_dflash.drafting.attention.capabilities import choose_attention
from sglang_dflash.drafting.graphs import Recorder
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.packed import Float16, packed_of
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.serving.gpu.backends import (
    ATTENTION,
    asked_attention,
    check_model_dtype,
    draft_kv_dtype,
    draft_ops,
)
from sglang_dflash.serving.gpu.graphs import cuda_recorder
from sglang_dflash.serving.hybrid.rollback import make_rollback
from sglang_dflash.serving.start import flags
from sglang_dflash.serving.start.plan import Plan
from sglang_dflash.serving.step.extension import load_extension

logger = Log(__name__)


def make_plan(server_args: Any, target_worker: Any, load_draft: Callable[..., DraftModel]) -> Plan:
    """Load the draft, and decide how it is served. Before SGLang sizes its pools.

    Args:
        load_draft: called with `dtype`, `device`, `tp` and `ops`.

    Raises:
        ConfigError: a setting does not fit the draft or the target.
    """
    ours, settings = flags.ServerFlags.of(server_args), resolving_view(server_args)
    runner = target_worker.model_runner
    device = torch.device(runner.device)
    check_model_dtype(runner.dtype, device)
    began = time.perf_counter()
    model = load_draft(
        dtype=runner.dtype, device=device, tp=tensor_parallel(), ops=draft_ops(device)
    )
    if device.type == "cpu":
        # Pack as the target is packed: its weights may be float16 beside float32 activations.
        head = unwrap_lora_layer(getattr(runner.model, "lm_head", None))
        model.pack(isinstance(packed_of(head), Float16))
    load_seconds = time.perf_counter() - began
    options = replace(
        flags.flag_options(server_args, settings).resolve(model.config),
        context=runner.model_config.context_len,
    )
    extension = load_extension(ours.extension, target_worker)
    if extension.width_policy is None:
        policy = flags.width_policy(server_args, settings, options)
    else:
        policy = extension.width_policy(options.verify_block)
    dtype = draft_kv_dtype(server_args, runner.dtype)
    attention = _attention(server_args, model, device, dtype)
    backend, role = ATTENTION[attention], settings.disaggregation_mode
    recorder: Callable[[], Recorder] | None = extension.recorder
    if recorder is None and ours.draft_graphs == "auto":
        recorder = cuda_recorder(device, backend.capabilities.capturable)
    plan = Plan(
        model=model,
        options=options,
        policy=policy,
        backend=backend,
        device=device,
        kv_dtype=dtype,
        max_running=settings.max_running_requests,
        arriving=(settings.disaggregation_decode_extra_slots or 0) if role == "decode" else 0,
        disaggregated=role in ("prefill", "decode"),
        hierarchical=settings.enable_hierarchical_cache,
        attention=attention,
        recorder=recorder,
        rollback=(
            None
            if role == "prefill"
            else make_rollback(options.recurrent_rollback, runner, options.verify_block)
        ),
        is_checked=ours.self_check == "on",
        extension=extension,
        load_seconds=load_seconds,
    )
    return plan.of_prompts() if role == "prefill" else plan


def _attention(server_args: Any, model: DraftModel, device: torch.device, kv: torch.dtype) -> str:
    """The name of the draft attention backend. Raises ConfigError."""
    requested = asked_attention(server_args)
    dtype = str(kv).removeprefix("torch.")
    chosen = choose_attention(requested, model.config, device.type, dtype)
    if requested is None and "flashinfer" in attention_backends_of(resolving_view(server_args)):
        logger.info(
            "the target attends by FlashInfer, the draft by %s: FlashInfer plans each "
            "step on the host, which has no part in a recorded draft step",
            chosen,
        )
    return chosen


def tensor_parallel() -> TensorParallel:
    """The target's tensor-parallel group, over which the drafter is sharded too."""
    group = get_parallel().tp_group

    def all_gather(x: Tensor) -> Tensor:
        return group.all_gather(x[None].contiguous(), dim=0)

    def from_first(number: int) -> int:
        if group.world_size == 1:
            return number
        shared = torch.tensor(number)
        torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
        return int(shared)

    return TensorParallel(
        group.rank_in_group, group.world_size, group.all_reduce, all_gather, from_first
    )
