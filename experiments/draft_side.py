"""A process of the experiment `draft_side`: draft steps of the demo draft, on request.

    python experiments/draft_side.py DRAFT REQUESTS CONTEXT WINDOW

with our packages of some commit on PYTHONPATH: of today's interface, or of that before draft
attention went through a table of entries (`visible_context`). For every line on stdin it runs as
many steps as the line says, and prints a JSON object: seconds of the processor, and the tokens
drafted last. WINDOW 0 is none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.backend import make_attention
from sglang_dflash.drafting.drafter import Drafter, TargetHead
from sglang_dflash.drafting.kv.direct import DirectKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.weights import load_model

CPU = torch.device("cpu")


def attention_of(config: Any, block: int, window: Any) -> Any:
    try:
        from sglang_dflash.drafting.attention.backend import Setting
    except ImportError:
        return make_attention("torch", config, block, CPU)  # type: ignore[arg-type, call-arg]
    return make_attention("torch", config, Setting(block, CPU, window=window))


def steps_of(draft: str, requests: int, context: int, window: int) -> Callable[[], Tensor]:
    """A step: propose for all requests, then take in the block's tokens. Returns the block."""
    torch.manual_seed(0)
    model: Any = load_model(draft, dtype=torch.float32, device="cpu")
    options: Any = Options(window=window or None).resolve(model.config)
    config, block, width = model.config, options.block_size, context + 16
    entries = options.draft_kv_entries(requests)
    cache: Any = DirectKVCache(requests * width, config.kv_shape, torch.float32, "cpu")
    if entries is not None:
        shape = (entries, requests * width, config.kv_shape)
        cache = RingKVCache(*shape, torch.float32, "cpu")
    embed = torch.randn(config.vocab_size, config.hidden_size)
    head = TargetHead(lambda ids: embed[ids], lambda hidden: (hidden @ embed.T).argmax(-1))
    attention = attention_of(config, block, options.context_window)
    drafter: Any = Drafter(model, head, cache, options, attention)
    table = torch.randperm(requests * width).view(requests, width).int()
    rows = torch.arange(requests)
    lengths = torch.full((requests,), context)
    old = torch.arange(context).expand(requests, -1)
    slots = table[rows[:, None], old].long()
    hidden = torch.randn(requests * context, config.target_hidden_width)
    drafter.absorb(hidden, old.flatten(), slots.flatten())
    bonus, new = torch.full((requests,), 7), lengths[:, None] + torch.arange(block)
    at = table[rows[:, None], new].long().flatten()
    fresh = torch.randn(requests * block, config.target_hidden_width)
    keep = (torch.arange(block) < 3).repeat(requests)

    def propose() -> Tensor:
        if hasattr(drafter, "visible_context"):
            positions = drafter.visible_context(lengths, context)
            found = table[rows[:, None], positions.clamp(max=width - 1)].long()
            return drafter.propose(bonus, lengths, positions, found)
        from sglang_dflash.drafting.attention.table import RequestSlots

        return drafter.propose(bonus, RequestSlots(table, rows, lengths, context))

    def step() -> Tensor:
        ids = propose()
        drafter.absorb(fresh, new.flatten(), at, keep=keep)
        return ids

    return step


def main() -> None:
    draft, *numbers = sys.argv[1:]
    torch.set_num_threads(1)
    with torch.inference_mode():
        step = steps_of(draft, *map(int, numbers))
        for line in sys.stdin:
            began = time.process_time()
            for _ in range(int(line)):
                ids = step()
            seconds = time.process_time() - began
            print(json.dumps({"seconds": seconds, "ids": ids.tolist()}), flush=True)


if __name__ == "__main__":
    main()
