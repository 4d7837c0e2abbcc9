"""State of the faked GPU in this process: its memory, the host's waits for it, and its captures."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter, deque
from typing import Any, Protocol

import torch
from torch import Tensor

# The variables of a server's environment: its memory in GiB, and how many GPUs there are.
MEMORY_GIB, COUNT = "FAKE_GPU_GIB", "FAKE_GPU_COUNT"
# So many of the last waits are remembered.
WAITS = 64
# Of these packages is the code that a wait is attributed to.
PACKAGES = ("/sglang/", "/sglang_dflash/", "/dflash_kernels/")


class Capture(Protocol):
    """A recorder of the operations of a stream capture."""

    def record(self, func: Any, args: Any, kwargs: Any, result: Any, run: Any) -> None: ...

    def launch(self, run: Any, args: Any, kwargs: Any) -> None: ...


class Storages:
    """Storages that are alive, by address."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.bytes = self.peak = 0

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a host tensor until it is freed."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in self.live:
            return
        size = storage.nbytes()
        self.live[address] = weakref.ref(storage, lambda _: self._release(address)), size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.live

    def by_size(self) -> dict[str, int]:
        """Bytes of a storage -> how many there are."""
        return dict(Counter(str(size) for _, size in self.live.values()))

    def _release(self, address: int) -> None:
        self.bytes -= self.live.pop(address)[1]


class Gpu:
    """The faked GPUs as this process sees them: it uses one of them.

    Attributes:
        index: the current device.
        memory: storages on it.
        pinned: storages of the host that are pinned.
        waits: kind and place -> how often the host has waited for the GPU there.
        uploads: kind and place -> copies from host memory that is not pinned.
        held: bytes of its memory at each of the last waits.
        launches: kernel -> how often it ran, and the seconds that it took here.
        capture: the graph that is being captured, if any.
    """

    def __init__(self) -> None:
        self.index = 0
        self.memory, self.pinned = Storages(), Storages()
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.held: deque[int] = deque(maxlen=WAITS)
        self.launches: dict[str, tuple[int, float]] = {}
        self.capture: Capture | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def count(self) -> int:
        return int(os.environ.get(COUNT, "1"))

    @property
    def total(self) -> int:
        """Bytes of its memory."""
        return int(float(os.environ.get(MEMORY_GIB, "4")) * 2**30)

    def wait(self, reason: str) -> None:
        """The host waits for the GPU.

        Raises:
            RuntimeError: during a capture, as CUDA refuses it.
        """
        if self.capture is not None:
            raise RuntimeError(
                "CUDA error: operation not permitted when stream is capturing "
                f"({reason} at {place()})"
            )
        self.waits[f"{reason} at {place()}"] += 1
        self.held.append(self.memory.bytes)

    def upload(self, host: Tensor, non_blocking: bool) -> None:
        """Copy a host tensor to the GPU: the host waits unless it is pinned and asked not to."""
        if not host.numel():
            return
        if not non_blocking:
            self.wait("blocking upload")
        elif host.ndim and host not in self.pinned:
            self.uploads[f"upload of pageable memory at {place()}"] += 1

    def launched(self, name: str, seconds: float) -> None:
        """A kernel has run."""
        times, before = self.launches.get(name, (0, 0.0))
        self.launches[name] = times + 1, before + seconds

    def report(self) -> dict[str, Any]:
        """Its figures for `/server_info`."""
        return {
            "total": self.total,
            "bytes": self.memory.bytes,
            "storages": self.memory.by_size(),
            "peak": self.memory.peak,
            "waits": dict(self.waits),
            "uploads": dict(self.uploads),
            "held": list(self.held),
            "launches": self.launches,
        }


GPU = Gpu()


def place() -> str:
    """The innermost function of SGLang or ours on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for package in PACKAGES:
            if package in file and "/fake_gpu/" not in file:
                inside = file.rpartition(package)[2]
                return f"{package.strip('/')}/{inside}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
