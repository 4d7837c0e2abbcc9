"""`torch.cuda`, `torch.accelerator` and `torch.distributed` of the faked GPU."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors

from tests.fake_gpu.gpu import GPU
from tests.fake_gpu.graph import Capturing, CUDAGraph
from tests.fake_gpu.streams import DEFAULT, Event, InStream, Stream, current_stream, set_stream
from tests.fake_gpu.tensor import REGISTERED, CudaTensor, OnGpu


class Properties:
    """`torch.cuda.get_device_properties` of an H100, but for its memory."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = 9, 0
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor, max_threads_per_block = 2048, 1024
    regs_per_multiprocessor = 65536
    shared_memory_per_block, shared_memory_per_block_optin = 49152, 232448
    shared_memory_per_multiprocessor = 233472
    L2_cache_size = 50 * 2**20
    memory_clock_rate, memory_bus_width, clock_rate = 2619000, 5120, 1980000
    gcnArchName, uuid = "", "0"
    is_integrated = is_multi_gpu_board = 0
    pci_bus_id = pci_device_id = pci_domain_id = 0

    @property
    def total_memory(self) -> int:
        return GPU.total


class OnDevice(contextlib.ContextDecorator):
    """`torch.cuda.device`."""

    def __init__(self, device: Any = None) -> None:
        self.idx = self.prev_idx = index_of(device)

    def __enter__(self) -> None:
        self.prev_idx = GPU.index
        set_device(self.idx)

    def __exit__(self, *error: Any) -> None:
        set_device(self.prev_idx)


class Generator(torch.Generator):
    """`torch.Generator`: one of the GPU draws the host's numbers."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        asked = torch.device(device)
        on_gpu = asked.type == "cuda"
        self._device = torch.device("cuda", index_of(asked)) if on_gpu else asked

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


def index_of(device: Any) -> int:
    """The index of a device as torch.cuda takes it; negative or without one is the current one."""
    if isinstance(device, Tensor):
        device = device.device
    if isinstance(device, int):
        return device if device >= 0 else GPU.index
    index = None if device is None else torch.device(device).index
    return GPU.index if index is None else index


def set_device(device: Any) -> None:
    """Set the device for torch's own code, too, which asks a guard that needs no driver."""
    GPU.index = index_of(device)
    torch._C._accelerator_setDeviceIndex(GPU.index)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stand-in for calls that have no effect here."""


def zero(*args: Any, **kwargs: Any) -> int:
    return 0


def live(device: Any = None) -> int:
    return GPU.memory.bytes


def peak(device: Any = None) -> int:
    return GPU.memory.peak


def forget_peak(device: Any = None) -> None:
    GPU.memory.peak = GPU.memory.bytes


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return GPU.total - GPU.memory.bytes, GPU.total


def synchronize(device: Any = None) -> None:
    GPU.wait("synchronize")


MEMORY: dict[str, Any] = {
    "memory_allocated": live,
    "max_memory_allocated": peak,
    "memory_reserved": live,
    "max_memory_reserved": peak,
    "mem_get_info": mem_get_info,
    "memory_stats": lambda device=None: defaultdict(int),
    "reset_peak_memory_stats": forget_peak,
    "empty_cache": nothing,
}
CUDA: dict[str, Any] = {
    **MEMORY,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: GPU.count,
    "current_device": lambda: GPU.index,
    "set_device": set_device,
    "device": OnDevice,
    "_DeviceGuard": OnDevice,
    "device_of": OnDevice,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: Properties(),
    "get_device_name": lambda device=None: Properties.name,
    "get_arch_list": lambda: ["sm_90"],
    "is_bf16_supported": lambda *args, **kwargs: True,
    "can_device_access_peer": lambda *args: True,
    "synchronize": synchronize,
    "current_stream": current_stream,
    "default_stream": lambda device=None: DEFAULT,
    "set_stream": set_stream,
    "stream": InStream,
    "StreamContext": InStream,
    "Stream": Stream,
    "ExternalStream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "graph": Capturing,
    "graph_pool_handle": lambda: (0, 1),
    "is_current_stream_capturing": lambda: GPU.capture is not None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "use_mem_pool": lambda *args, **kwargs: contextlib.nullcontext(),
    "MemPool": lambda *args, **kwargs: SimpleNamespace(id=(0, 1)),
    "current_blas_handle": zero,
    **dict.fromkeys(
        (
            "ipc_collect",
            "_lazy_init",
            "init",
            "manual_seed",
            "manual_seed_all",
            "set_rng_state",
            "set_per_process_memory_fraction",
        ),
        nothing,
    ),
}
RUNTIME = SimpleNamespace(
    cudaProfilerStart=zero,
    cudaProfilerStop=zero,
    cudaHostRegister=zero,
    cudaHostUnregister=zero,
    cudaStreamSynchronize=zero,
    cudaMemGetInfo=mem_get_info,
    cudaError=SimpleNamespace(success=0),
    cudaGetErrorString=str,
)
ACCELERATOR: dict[str, Any] = {
    "is_available": lambda: True,
    "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
    "synchronize": synchronize,
    "current_stream": current_stream,
    "device_count": lambda: GPU.count,
    "current_device_index": lambda: GPU.index,
    "set_device_index": set_device,
    "empty_cache": nothing,
}


def replace_torch_cuda() -> None:
    """Let torch say that it has a GPU."""
    cuda: Any = torch.cuda
    for target, values in (
        (cuda, CUDA),
        (cuda.memory, MEMORY),
        (torch.accelerator, ACCELERATOR),
        (cuda.graphs, {"graph": Capturing, "CUDAGraph": CUDAGraph}),
        (cuda.streams, {"Stream": Stream, "Event": Event}),
        (torch, {"Stream": Stream, "Event": Event, "Generator": Generator}),
        (cuda.nccl, {"version": lambda: (2, 30, 7)}),
        (cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), nothing)),
        (cuda.nvtx, {"range": lambda *args, **kwargs: contextlib.nullcontext()}),
        (cuda, {"cudart": lambda: RUNTIME}),
    ):
        for name, value in values.items():
            setattr(target, name, value)
    replace_tensor_methods()
    # As FakeTensorMode does, so that torch asks no driver.
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    torch._C._set_only_lift_cpu_tensors(True)


def replace_tensor_methods() -> None:
    """Methods that ask the driver without an operation that a mode would see."""
    tensor: Any = Tensor
    tensor.record_stream = nothing
    # There is no driver to pin memory.
    tensor.pin_memory = pin_memory
    tensor.is_pinned = lambda self, *_: not isinstance(self, CudaTensor) and self in GPU.pinned
    # torch remembers which functions `with torch.device(...)` is for: the compiled ones.
    _device_constructors()
    make, same = torch.tensor, torch._has_compatible_shallow_copy_type

    def new_tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        return made.pin_memory() if pin_memory else made

    def compatible(a: Tensor, b: Tensor) -> bool:
        return not any(isinstance(x, CudaTensor) for x in (a, b)) and same(a, b)

    torch.tensor = new_tensor
    torch._has_compatible_shallow_copy_type = compatible


def pin_memory(host: Tensor, *_: Any) -> Tensor:
    if host in GPU.pinned:
        return host
    pinned = host.clone(memory_format=torch.contiguous_format)
    GPU.pinned.add(pinned)
    return pinned


def remember_registered_operators() -> None:
    """Note the Python code of operators that are registered for CUDA from now on."""
    register = torch.library.Library.impl

    def impl(self: Any, op: Any, fn: Any, key: str = "", **kwargs: Any) -> Any:
        name = (op if isinstance(op, str) else op._schema.name).split(".")[0]
        name = name if "::" in name else f"{self.ns}::{name}"
        on_cuda = (key or self.dispatch_key) in ("CUDA", "CompositeExplicitAutograd", "")
        if on_cuda and callable(fn) and not name.startswith("aten"):
            REGISTERED[name] = fn
        return register(self, op, fn, key, **kwargs)

    torch.library.Library.impl = impl


def enter_every_thread() -> None:
    """Threads that start from now on, and this one, make tensors on the faked GPU."""
    run = threading.Thread.run

    def on_gpu(self: threading.Thread) -> None:
        with OnGpu():
            run(self)

    threading.Thread.run = on_gpu
    OnGpu().__enter__()


def replace_nccl() -> None:
    """Ranks talk over gloo."""
    make, new = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return make("gloo", *args, **kwargs)

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return new(ranks, timeout, "gloo", *args, **kwargs)

    dist.init_process_group, dist.new_group = init_process_group, new_group
