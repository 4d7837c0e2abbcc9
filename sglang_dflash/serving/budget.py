"""The target's KV pool is sized without a draft slot per target token when the draft K/V is bounded.

A bounded draft cache is allocated before SGLang measures the memory that is left, so its bytes are charged as they are.
"""

from __future__ import annotations

from typing import Any

# Set by the worker of this process before the target's pool is sized.
draft_kv_is_bounded = False


def target_cell_size(original: Any, *, target_cell_size_per_token: int, **others: Any) -> int:
    """Hook around SGLang's "target + draft bytes per token"."""
    if draft_kv_is_bounded:
        return target_cell_size_per_token
    return original(target_cell_size_per_token=target_cell_size_per_token, **others)


def draft_cell_size(original: Any, configurator: Any) -> int:
    """Hook around SGLang's "draft bytes per target token"."""
    return 0 if draft_kv_is_bounded else original(configurator)
