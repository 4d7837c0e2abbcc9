"""Rows on their way between device and host memory: through page-locked memory of a fixed size, and
moved on the host by a thread of its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Page-locked bytes. A piece takes a quarter of them at most.
RING = 1 << 27
# Bytes of the int64 that goes with each row. Buffers begin at multiples, as any dtype needs.
NUMBER = 8

Job = Callable[[], object]


@dataclass(eq=False)
class StagingBuffer:
    """A buffer of the ring that is in use.

    Attributes:
        byte_range: its bytes in the ring.
        rows: `[N, ...]`, in it.
        numbers: int64 `[N]`, in it.
        job: the thread's. None until what comes from the device has arrived.
        event: of a copy to the device, once it has begun.
    """

    byte_range: range
    rows: Tensor
    numbers: Tensor
    job: Future[object] | None = None
    event: Any = None

    @property
    def is_free(self) -> bool:
        """Return whether the thread and the device have finished with it."""
        is_done = self.job is not None and self.job.done()
        return is_done and (self.event is None or bool(self.event.query()))


class Staging:
    """Copies between device and host memory, in order, on the current stream.

    Buffers are taken from the ring in turn, once there is room.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._at = device, 0
        self._ring = page_locked(RING, device)
        self._used = deque[StagingBuffer]()
        # On their way to the host, and what the thread is to do then.
        self._sent = deque[tuple[Any, Job, StagingBuffer | None]]()
        self._thread = ThreadPoolExecutor(1, "dflash-host-tier")
        self._jobs = deque[Future[object]]()

    @staticmethod
    def most_rows(row: Tensor) -> int:
        """Rows of a piece, at most."""
        return max(1, RING // 4 // (row.nbytes + NUMBER))

    def has_room(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether the next buffer, for rows `[N, ...]` of that shape, is free."""
        following = self._next(shape, dtype)
        return all(
            buffer.is_free for buffer in self._used if _overlap(buffer.byte_range, following)
        )

    def send(self, rows: Tensor, live: Tensor, store: Callable[[Tensor, Tensor], object]) -> None:
        """The thread calls `store(rows, live)` when both are on the host; `live` is bool `[N]`.
        There must be room."""
        buffer = self._take(rows.shape, rows.dtype)
        live_rows = buffer.numbers.view(torch.bool)[: len(rows)]
        buffer.rows.copy_(rows, non_blocking=True)
        live_rows.copy_(live, non_blocking=True)
        self._sent.append((self._recorded(), partial(store, buffer.rows, live_rows), buffer))

    def enqueue(self, job: Job) -> None:
        """The thread does that after what was sent."""
        self._sent.append((None, job, None))

    def fetch(self, host: Tensor, rows: Tensor, numbers: Tensor) -> StagingBuffer:
        """The thread begins to gather rows of host memory, int64 `[N]`. Everything that was sent
        must have arrived, and there must be room. `numbers`, int64 `[N]`, go with them."""
        buffer = self._take((len(rows), *host.shape[1:]), host.dtype)
        buffer.numbers.copy_(numbers)
        buffer.job = self._submit(partial(torch.index_select, host, 0, rows, out=buffer.rows))
        return buffer

    def to_device(self, buffer: StagingBuffer) -> tuple[Tensor, Tensor]:
        """The rows and numbers that were fetched, on the device; on a CPU in the ring. Waits for
        the thread."""
        if buffer.job is not None:
            buffer.job.result()
        rows, numbers = (
            host.to(self._device, non_blocking=True) for host in (buffer.rows, buffer.numbers)
        )
        buffer.event = self._recorded()
        return rows, numbers

    def poll(self) -> None:
        """Let the thread take in what has arrived, in the order in which it was sent. Raises what
        it has raised."""
        while self._sent and (self._sent[0][0] is None or self._sent[0][0].query()):
            self._submit_next()
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()

    @property
    def is_idle(self) -> bool:
        """Return whether everything that was sent has been taken in."""
        return not self._sent and all(job.done() for job in self._jobs)

    def wait(self) -> None:
        """Until everything that was sent is taken in, and there is room."""
        while self._sent:
            self._submit_next()
        while self._jobs:
            self._jobs.popleft().result()
        for buffer in self._used:
            if buffer.event is not None:
                buffer.event.synchronize()

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> StagingBuffer:
        """A buffer for rows `[N, ...]` of that shape."""
        byte_range, first = self._next(shape, dtype), shape[0] * NUMBER
        # Those before one that is free are free, too: device and thread do all in order.
        while any(_overlap(used.byte_range, byte_range) for used in self._used):
            self._used.popleft()
        # The next buffer has int64, too.
        self._at = -(-byte_range.stop // NUMBER) * NUMBER
        memory = self._ring[byte_range.start : byte_range.stop]
        rows, numbers = memory[first:].view(dtype).view(*shape), memory[:first].view(torch.int64)
        self._used.append(StagingBuffer(byte_range, rows, numbers))
        return self._used[-1]

    def _next(self, shape: Sequence[int], dtype: torch.dtype) -> range:
        """The bytes of the next buffer."""
        size = shape[0] * NUMBER + math.prod(shape) * dtype.itemsize
        begin = self._at if self._at + size <= RING else 0
        return range(begin, begin + size)

    def _submit_next(self) -> None:
        """Hand what was sent first to the thread, which itself never waits for a device."""
        event, job, buffer = self._sent.popleft()
        if event is not None:
            event.synchronize()
        future = self._submit(job)
        if buffer is not None:
            buffer.job = future

    def _submit(self, job: Job) -> Future[object]:
        future = self._thread.submit(_inferred, job)
        self._jobs.append(future)
        return future

    def _recorded(self) -> Any:
        event = _event(self._device)
        if event is not None:
            event.record()
        return event


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _inferred(job: Job) -> object:
    """A thread begins without the inference mode in which the scheduler makes its tensors."""
    with torch.inference_mode():
        return job()


def page_locked(size: int, device: torch.device) -> Tensor:
    """Host memory of so many bytes, uint8 `[size]`, which copies need not wait for."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")


def _event(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device).Event()
