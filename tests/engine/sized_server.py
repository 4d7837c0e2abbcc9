"""`sglang.launch_server` on a machine that seems to have 16 GiB, all of it free.

A module for the nursery to run (see nursery.py): the scheduler process inherits what it changes.
"""

from __future__ import annotations

import runpy

import psutil
from sglang.srt.utils import common

GIB = 1 << 30


def free_memory() -> int:
    return 16 * GIB - psutil.Process().memory_info().rss


common.get_free_cpu_memory = free_memory

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
