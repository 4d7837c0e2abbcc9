"""Recorded steps of the drafter: at which batch sizes, and the recorder for CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.common.log import Log
from sglang_dflash.drafting.drafter import Drafter, Proposer
from sglang_dflash.drafting.graphs import GraphedDrafter, Recorder, default_batch_buckets
from sglang_dflash.drafting.recording_check import check_recording

logger = Log(__name__)


# SGLang records no draft graphs if a rank has less free memory than this, and neither do we.
LEAST_FREE_GIB = 1.0


class CudaGraphRecorder:
    """A `Recorder` by CUDA graphs. Those that are recorded together share a memory pool of their
    own: the target's graphs may still hold logits in theirs."""

    def __init__(self) -> None:
        from sglang.srt.runtime_context import get_parallel

        self._group = get_parallel().tp_group

    def record(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
        from sglang.srt.distributed.parallel_state import graph_capture
        from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
        from sglang.srt.model_executor.runner_utils.pool import (
            get_or_create_global_graph_capture_stream,
        )

        # Not the last one: the allocator refuses a pool whose graphs are gone while a tensor of
        # theirs is left, as the last table of draft attention is.
        pool = torch.cuda.graph_pool_handle()
        set_graph_pool_id(pool)
        torch.cuda.empty_cache()
        # Opened once: at its end the ranks exchange the addresses of their all-reduce buffers.
        with (
            freeze_gc(False),
            graph_capture(stream=get_or_create_global_graph_capture_stream()) as context,
        ):
            replays = [self._record(run, pool) for run in runs]
        torch.cuda.current_stream().wait_stream(context.stream)
        torch.cuda.synchronize()
        return replays

    def _record(self, run: Callable[[], None], pool: Any) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Kernels are compiled and libraries initialized before the capture.
        for _ in range(2):
            torch.cuda.synchronize()
            self._group.barrier()
            run()
        torch.cuda.synchronize()
        graph.capture_begin(pool=pool)
        try:
            run()
        finally:
            graph.capture_end()
        return graph.replay

    def free_gib(self) -> float:
        """Return the minimum of free GPU memory over all ranks, in GiB."""
        from sglang.srt.utils.common import get_available_gpu_memory

        several, index = self._group.world_size > 1, torch.cuda.current_device()
        return get_available_gpu_memory("cuda", index, several, cpu_group=self._group.cpu_group)


def cuda_recorder(device: torch.device, capturable: bool) -> type[CudaGraphRecorder] | None:
    """The recorder if the target's decode steps are captured there; else None.

    Args:
        capturable: whether the draft attention backend can be captured.
    """
    if not target_has_graphs(device):
        return None
    if not capturable:
        logger.warning(
            "draft steps run without CUDA graphs: the draft attention backend cannot be captured"
        )
        return None
    return CudaGraphRecorder


def graphed(
    drafter: Proposer,
    recorder: Recorder,
    req_to_token: Tensor,
    admitted: int,
    self_check: bool,
    widths: Sequence[int] = (),
) -> Proposer:
    """The drafter with its steps recorded; the drafter itself if they cannot be.

    Args:
        req_to_token: int32 `[rows, positions]`; the first row is SGLang's for padding.
        admitted: requests that run at a time, at most: what attention was made for. A decode
            server's table has more rows.
        self_check: whether a recorded proposal is compared with an eager one.
        widths: tokens that steps verify, beside the whole block.

    Raises:
        SelfCheckFailed: they differ.
    """
    if type(drafter) is not Drafter:
        logger.warning(
            "draft steps run without CUDA graphs: those of a %s cannot be recorded",
            type(drafter).__name__,
        )
        return drafter
    if isinstance(recorder, CudaGraphRecorder) and (free := recorder.free_gib()) < LEAST_FREE_GIB:
        logger.warning(
            "draft steps run without CUDA graphs: %.2f GiB of memory are free, and %.0f "
            "are wanted; lower --mem-fraction-static or --cuda-graph-max-bs-decode",
            free,
            LEAST_FREE_GIB,
        )
        return drafter
    began, buckets = time.perf_counter(), captured_sizes(admitted)
    # Recordings are made and replayed without gradients.
    with torch.no_grad():
        recorded = GraphedDrafter(drafter, recorder, req_to_token, buckets, widths=widths)
        # While graphs are captured, all-reduces of eager steps return anything.
        drafter.counters.clear()
        if self_check:
            check_recording(drafter, recorded, req_to_token, buckets, widths)
            recorded.replays = dict.fromkeys(recorded.replays, 0)
    logger.info(
        "draft steps recorded in %.1f s by %s: %s",
        time.perf_counter() - began,
        type(recorder).__name__,
        recorded.describe(),
    )
    return recorded


def target_has_graphs(device: torch.device) -> bool:
    """Return whether SGLang captures the target's decode steps: CUDA, without
    --disable-cuda-graph."""
    if device.type != "cuda":
        return False
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec

    config = get_exec().graph.cuda_graph_config
    return config is not None and config.decode.backend != Backend.DISABLED


def captured_sizes(most: int) -> tuple[int, ...]:
    """The target's batch sizes, by --cuda-graph-bs-decode and the like, up to `most` requests; that
    is one of them if the largest size is larger."""
    from sglang.srt.runtime_context import get_exec

    graph: Any = get_exec().graph
    config = graph.cuda_graph_config
    sizes = graph.cuda_graph_bs_decode or (config.decode.bs if config is not None else None)
    if not sizes:
        return default_batch_buckets(most)
    return tuple(sorted({min(n, most) for n in sizes}))
