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
# Of an int64 that goes with each row. Parts of the ring begin at multiples, as any dtype needs.
NUMBER = 8

Job = Callable[[], object]


@dataclass(eq=False)
class Part:
    """A part of the ring that is in use.

    Attributes:
        where: its bytes in the ring.
        rows: `[N, ...]`, in it.
        numbers: int64 `[N]`, in it.
        job: the thread's. None until what comes from the device has arrived.
        event: of a copy to the device, once it has begun.
    """

    where: range
    rows: Tensor
    numbers: Tensor
    job: Future[object] | None = None
    event: Any = None


class Staging:
    """Copies between device and host memory, in order, on the current stream.

    The ring's parts are taken in turn. Who takes one waits for what was in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._at = device, 0
        self._ring = _page_locked(RING, device)
        self._used = deque[Part]()
        # On their way to the host, and what the thread is to do then.
        self._sent = deque[tuple[Any, Job, Part | None]]()
        self._thread = ThreadPoolExecutor(1, "dflash-host-tier")
        self._jobs = deque[Future[object]]()

    @staticmethod
    def most_rows(row: Tensor) -> int:
        """Rows of a piece, at most."""
        return max(1, RING // 4 // (row.nbytes + NUMBER))

    def send(self, rows: Tensor, live: Tensor, keep: Callable[[Tensor, Tensor], object]) -> None:
        """The thread calls `keep(rows, live)` when both are on the host; `live` is bool `[N]`."""
        part = self._take(rows.shape, rows.dtype)
        there = part.numbers.view(torch.bool)[: len(rows)]
        part.rows.copy_(rows, non_blocking=True)
        there.copy_(live, non_blocking=True)
        self._sent.append((self._recorded(), partial(keep, part.rows, there), part))

    def then(self, job: Job) -> None:
        """The thread does that after what was sent."""
        self._sent.append((None, job, None))

    def fetch(self, host: Tensor, rows: Tensor, numbers: Tensor) -> Part:
        """The thread begins to gather rows of host memory, int64 `[N]`. Everything that was sent
        must have arrived. `numbers`, int64 `[N]`, go with them."""
        part = self._take((len(rows), *host.shape[1:]), host.dtype)
        part.numbers.copy_(numbers)
        part.job = self._do(partial(torch.index_select, host, 0, rows, out=part.rows))
        return part

    def bring(self, part: Part) -> tuple[Tensor, Tensor]:
        """The rows and numbers that were fetched, on the device; on a CPU in the ring. Waits for
        the thread."""
        self._finish(part)
        rows, numbers = (
            host.to(self._device, non_blocking=True) for host in (part.rows, part.numbers)
        )
        part.event = self._recorded()
        return rows, numbers

    def land(self) -> None:
        """Let the thread take in what has arrived, in the order in which it was sent. Raises what
        it has raised."""
        while self._sent and (self._sent[0][0] is None or self._sent[0][0].query()):
            self._pass_on()
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()

    def wait(self) -> None:
        """Until everything that was sent is taken in."""
        while self._sent:
            self._pass_on()
        while self._jobs:
            self._jobs.popleft().result()

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> Part:
        """A part for rows `[N, ...]` of that shape."""
        first = shape[0] * NUMBER
        size = first + math.prod(shape) * dtype.itemsize
        if self._at + size > RING:
            self._at = 0
        where = range(self._at, self._at + size)
        while any(
            used.where.start < where.stop and where.start < used.where.stop for used in self._used
        ):
            self._free(self._used.popleft())
        # The next part has int64, too.
        self._at = -(-where.stop // NUMBER) * NUMBER
        mine = self._ring[where.start : where.stop]
        rows, numbers = mine[first:].view(dtype).view(*shape), mine[:first].view(torch.int64)
        self._used.append(Part(where, rows, numbers))
        return self._used[-1]

    def _finish(self, part: Part) -> None:
        while part.job is None:
            self._pass_on()
        part.job.result()

    def _free(self, part: Part) -> None:
        self._finish(part)
        if part.event is not None:
            part.event.synchronize()

    def _pass_on(self) -> None:
        """Hand what was sent first to the thread, which itself never waits for a device."""
        event, job, part = self._sent.popleft()
        if event is not None:
            event.synchronize()
        passed = self._do(job)
        if part is not None:
            part.job = passed

    def _do(self, job: Job) -> Future[object]:
        passed = self._thread.submit(_inferred, job)
        self._jobs.append(passed)
        return passed

    def _recorded(self) -> Any:
        event = _event(self._device)
        if event is not None:
            event.record()
        return event


def _inferred(job: Job) -> object:
    """A thread begins without the inference mode in which the scheduler makes its tensors."""
    with torch.inference_mode():
        return job()


def _page_locked(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")


def _event(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device).Event()
