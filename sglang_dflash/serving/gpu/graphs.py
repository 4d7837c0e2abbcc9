"""Whether the drafter's steps are recorded, at which batch sizes, and the recorder for CUDA."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.drafter import Drafter, Proposer
from sglang_dflash.drafting.graphs import GraphedDrafter, batch_buckets
from sglang_dflash.drafting.recording import OpRecorder, Recorder
from sglang_dflash.drafting.self_check import check_recording
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.serving.start.flags import DRAFT_GRAPHS

logger = logging.getLogger(__name__)

FLAG = "--speculative-dflash-draft-graphs"
AUTO, OFF, RECORDED = DRAFT_GRAPHS


class CudaGraphRecorder:
    """A `Recorder` by CUDA graphs, which share one memory pool of their own: the target's graphs
    may still hold logits in theirs."""

    def __init__(self) -> None:
        from sglang.srt.runtime_context import get_parallel

        self._pool = torch.cuda.graph_pool_handle()
        self._group = get_parallel().tp_group

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
        from sglang.srt.distributed.parallel_state import graph_capture
        from sglang.srt.model_executor.runner_utils.pool import (
            get_or_create_global_graph_capture_stream,
        )

        set_graph_pool_id(self._pool)
        graph = torch.cuda.CUDAGraph()
        with graph_capture(stream=get_or_create_global_graph_capture_stream()) as context:
            # Kernels are compiled and libraries initialized before the capture.
            for _ in range(2):
                torch.cuda.synchronize()
                self._group.barrier()
                run()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, stream=context.stream):
                run()
        torch.cuda.current_stream().wait_stream(context.stream)
        torch.cuda.synchronize()
        return graph.replay


def check_graphs(asked: str, device: torch.device, tp_size: int) -> None:
    """Raise ConfigError if the value `asked` of the flag cannot be served there."""
    if asked != RECORDED:
        return
    if device.type != "cpu":
        raise ConfigError(
            f"{FLAG}: {asked!r} lists torch operations, and {device.type} computes with Triton "
            f"kernels; choose {AUTO!r} for CUDA graphs, or {OFF!r}"
        )
    if tp_size > 1:
        raise ConfigError(
            f"{FLAG}: {asked!r} with --tp-size {tp_size}: an exchange between ranks is not "
            f"recorded; use --tp-size 1, or {OFF!r}"
        )


def largest_recorded(asked: str, device: torch.device, capturable: bool, most: int) -> int:
    """Requests of the largest batch whose steps are recorded, of up to `most`; 0 if none are.

    Args:
        asked: the flag's value.
        capturable: see `graphed`.
    """
    records = asked == RECORDED or (asked == AUTO and capturable and target_has_graphs(device))
    return captured_sizes(most)[-1] if records else 0


def graphed(
    drafter: Proposer,
    asked: str,
    device: torch.device,
    req_to_token: Tensor,
    capturable: bool,
    self_check: bool,
) -> Proposer:
    """The drafter with its steps recorded, or the drafter itself if they are not.

    Args:
        asked: the flag's value.
        req_to_token: int32 `[rows, positions]`; the first row is SGLang's for padding.
        capturable: whether the draft attention backend can be captured in a CUDA graph.
        self_check: whether a recorded proposal is compared with an eager one.

    Raises:
        SelfCheckFailed: they differ.
    """
    recorder = _recorder(drafter, asked, device, capturable)
    if recorder is None or not isinstance(drafter, Drafter):
        return drafter
    began, buckets = time.perf_counter(), captured_sizes(len(req_to_token) - 1)
    # Recordings are made and replayed without gradients.
    with torch.no_grad():
        made = GraphedDrafter(drafter, recorder, req_to_token, buckets)
        if self_check:
            check_recording(drafter, made, req_to_token, buckets[-1])
            made.replays = dict.fromkeys(made.replays, 0)
    logger.info(
        "DFLASH: draft steps recorded in %.1f s by %s: %s",
        time.perf_counter() - began,
        type(recorder).__name__,
        made.describe(),
    )
    return made


def _recorder(
    drafter: Proposer, asked: str, device: torch.device, capturable: bool
) -> Recorder | None:
    if asked == OFF or (asked == AUTO and not target_has_graphs(device)):
        return None
    reason = None
    if not drafter.capturable:
        reason = f"those of a {type(drafter).__name__} cannot be recorded"
    elif asked == AUTO and not capturable:
        reason = "the draft attention backend cannot be captured"
    if reason is not None:
        logger.warning("DFLASH: draft steps run without CUDA graphs: %s", reason)
        return None
    return CudaGraphRecorder() if asked == AUTO else OpRecorder()


def target_has_graphs(device: torch.device) -> bool:
    """Whether SGLang captures the target's decode steps: CUDA, without --disable-cuda-graph."""
    if device.type != "cuda":
        return False
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec

    config = get_exec().graph.cuda_graph_config
    return config is not None and config.decode.backend != Backend.DISABLED


def captured_sizes(most: int) -> tuple[int, ...]:
    """The target's batch sizes, by --cuda-graph-bs-decode and the like, up to `most` requests."""
    from sglang.srt.runtime_context import get_exec

    graph: Any = get_exec().graph
    config = graph.cuda_graph_config
    sizes = graph.cuda_graph_bs_decode or (config.decode.bs if config is not None else None)
    if not sizes:
        return batch_buckets(most)
    return tuple(n for n in sizes if n <= most) or (most,)
