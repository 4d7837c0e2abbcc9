"""CUDA graphs, and timing of functions on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPEATS = 30
# Bytes of the copy that measures bandwidth. Source and target must fit into memory.
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}


class CudaGraphs:
    """A `Recorder` that makes CUDA graphs, which share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, runs: Sequence[Callable[[], object]]) -> list[Callable[[], None]]:
        return [self._record(run) for run in runs]

    def _record(self, run: Callable[[], object]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Kernels are compiled and libraries initialized before the capture.
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        torch.cuda.synchronize()
        return graph.replay


def milliseconds(device: torch.device, run: Callable[[], object]) -> float:
    """Return the median time of `REPEATS` runs, after three runs that are not counted.

    On CUDA, events measure the time: the host's work counts only if the device waits for it.
    """
    for _ in range(3):
        run()
    if device.type != "cuda":
        return statistics.median(1000 * seconds(run) for _ in range(REPEATS))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    torch.cuda.synchronize()
    for began, ended in pairs:
        began.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(began.elapsed_time(ended) for began, ended in pairs)


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one run, on the host."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def waits_for_the_device(run: Callable[[], object]) -> str | None:
    """Return why the host waits for the device in a run on CUDA; None if it does not wait."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (milliseconds(device, lambda: target.copy_(source)) / 1000)
