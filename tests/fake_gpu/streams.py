"""Streams and events of the faked GPU: work runs at once and in order, so they are only names."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from tests.fake_gpu.gpu import GPU


class Stream:
    """`torch.cuda.Stream`."""

    device_type = 1
    _ids = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = self.cuda_stream = next(Stream._ids)
        self.device, self.device_index, self.priority = GPU.device, GPU.index, priority
        self._entered: list[InStream] = []

    def synchronize(self) -> None:
        GPU.wait("Stream.synchronize")

    def query(self) -> bool:
        return True

    def wait_stream(self, other: Stream) -> None:
        """The device waits, not the host."""

    def wait_event(self, event: Event) -> None:
        """The device waits, not the host."""

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        self._entered.append(InStream(self))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


class Event:
    """`torch.cuda.Event`."""

    cuda_event = 1

    def __new__(cls, *args: Any, **kwargs: Any) -> Event:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = GPU.device

    def record(self, stream: Stream | None = None) -> None:
        """All work before it has run."""

    def wait(self, stream: Stream | None = None) -> None:
        """The device waits, not the host."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        GPU.wait("Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1.0


DEFAULT = Stream()
CURRENT = threading.local()


def current_stream(device: Any = None) -> Stream:
    return getattr(CURRENT, "stream", DEFAULT)


def set_stream(stream: Stream) -> None:
    CURRENT.stream = stream


class InStream:
    """`torch.cuda.stream`; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = current_stream()
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        set_stream(self.before)
