"""The device of a recipe: its clock, memory, fastest dtype and name."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor


def now(device: torch.device) -> float:
    """Return seconds: CPU time of this process, or wall time if the device is a GPU."""
    return time.process_time() if device.type == "cpu" else time.monotonic()


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that `now` counts it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> float:
    """Return a GPU's memory in bytes; infinity on a CPU, where states are mapped from files."""
    if device.type == "cpu":
        return float("inf")
    return float(torch.cuda.get_device_properties(device).total_memory)


def send(host: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to the device, without waiting for a GPU."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def name_of(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 for a GPU, and for a CPU that multiplies it faster than float32."""
    if device.type != "cpu":
        return torch.bfloat16
    x, w = torch.randn(256, 1024), torch.randn(1024, 1024)
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = x.to(dtype), w.to(dtype)
        F.linear(a, b)
        began = time.perf_counter()
        for _ in range(5):
            F.linear(a, b)
        times[dtype] = time.perf_counter() - began
    return min(times, key=times.__getitem__)
