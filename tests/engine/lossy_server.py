"""`sglang.launch_server` whose draft KV cache loses a random half of its entries before every proposal, sized as in sized_server.

A module for the nursery to run (see nursery.py): what it changes is inherited by the scheduler process.
"""

from __future__ import annotations

import runpy
from typing import Any

import torch

from sglang_dflash.core.kv_cache import DraftKVCache
from tests.engine import sized_server  # noqa: F401

_gather = DraftKVCache.gather


def lose_half_and_gather(self: DraftKVCache, *args: Any, **kwargs: Any) -> Any:
    self.owner[torch.rand(len(self.owner)) < 0.5] = -1
    return _gather(self, *args, **kwargs)


DraftKVCache.gather = lose_half_and_gather  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
