"""Compile FlashAttention 4 for a GPU that need not be here, as draft attention calls it.

    python -m tests.kernels.compile_flash_attention CAPABILITY

prints the kinds of layers of the published drafts for which it compiled, as a JSON list. A process
of its own: FA4 reads the architecture from the environment when it is imported.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_dflash.checkpoint.draft_config import DraftConfig, LayerAttention
from sglang_dflash.drafting.attention.paged import PagedAttention
from sglang_dflash.drafting.attention.table import ContextTable
from tests.kernels.compile_kernels import published

REQUESTS, COLUMNS = 4, 96


def kinds() -> dict[str, tuple[DraftConfig, LayerAttention]]:
    """Distinct heads, block sizes and layers of the published drafts, by name."""
    found = {}
    for config in published():
        for layer in config.layers:
            sees = f"{'causal' if layer.causal else 'full'}-{layer.sliding_window or 0}"
            groups = config.num_attention_heads // config.num_key_value_heads
            name = f"b{config.block_size} g{groups} d{config.head_dim} {sees}"
            found[name] = config, layer
    return found


def compile_for(capability: int, config: DraftConfig, layer: LayerAttention) -> None:
    """One call of `PagedAttention` on fake tensors. Raises if it does not compile."""
    from sglang_dflash.serving.gpu.flash_attention import FA4_SPLITS, fa4_kernel

    block, heads, kv_heads = (
        config.block_size, config.num_attention_heads, config.num_key_value_heads
    )  # fmt: skip
    kernel = fa4_kernel(FA4_SPLITS[capability // 10])
    with FakeTensorMode(), torch.device("cuda"):
        kv = torch.empty(
            1000 + REQUESTS * block, 1, 2, kv_heads, config.head_dim, dtype=torch.bfloat16
        )
        attention = PagedAttention([layer], block, 1000, kernel)
        entries = torch.empty(REQUESTS, COLUMNS, dtype=torch.int32)
        lengths = torch.empty(REQUESTS, dtype=torch.int64)
        attention.prepare(kv, ContextTable(entries, lengths))
        q = torch.empty(REQUESTS, block, heads, config.head_dim, dtype=torch.bfloat16)
        k, v = q.new_empty(2, REQUESTS, block, kv_heads, config.head_dim)
        out = attention.attend(0, q, k, v)
        if out.shape != q.shape or out.dtype != q.dtype:
            raise RuntimeError(f"{out.shape} {out.dtype}; {q.shape} {q.dtype} was expected")


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    os.environ["FLASH_ATTENTION_ARCH"] = f"sm_{wanted}"
    os.environ["CUTE_DSL_ARCH"] = f"sm_{wanted}a"
    # Of an H100 and a B200: FA4 chooses its splits by it.
    os.environ["FLASH_ATTENTION_NUM_SMS"] = {90: "132", 100: "148"}[wanted]
    compiled = []
    for name, (config, layer) in kinds().items():
        compile_for(wanted, config, layer)
        compiled.append(name)
    print(json.dumps(compiled))
