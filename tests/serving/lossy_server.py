"""`sglang.launch_server` whose draft KV cache loses a random half of its entries before every proposal.

Run with `python -m tests.serving.lossy_server ARGS`: SGLang's scheduler process imports its parent's main module, and so this one.
"""

from __future__ import annotations

import runpy
from typing import Any

import torch

from sglang_dflash.core.kv_cache import DraftKVCache

_gather = DraftKVCache.gather


def lose_half_and_gather(self: DraftKVCache, *args: Any, **kwargs: Any) -> Any:
    self.owner[torch.rand(len(self.owner)) < 0.5] = -1
    return _gather(self, *args, **kwargs)


DraftKVCache.gather = lose_half_and_gather  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
