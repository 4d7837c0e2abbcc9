"""Memory that a process uses, without what its allocators hold for later."""

from __future__ import annotations

import ctypes
import sys

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def in_use() -> dict[str, int]:
    """`malloc_bytes`: glibc's allocations of all threads, torch's tensors among them (`mallinfo2`).
    `python_blocks`: small allocations of Python, which has an allocator of its own."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _MallInfo
    found = read()
    return {
        "malloc_bytes": found.uordblks + found.hblkhd,
        "python_blocks": sys.getallocatedblocks(),
    }
