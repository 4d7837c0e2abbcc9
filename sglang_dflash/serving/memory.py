"""Memory of a bounded draft KV cache, in SGLang's sizing of the target's KV pool.

SGLang charges a draft slot per target token. A bounded cache is charged once, and the target's tokens at their own price; if that
leaves the target fewer tokens, because the bound is above what the pool could ever hold, SGLang's way stands.
"""

from __future__ import annotations

from typing import Any


class DraftKVBudget:
    """Hooks around SGLang's pool sizing.

    `bounded_bytes`: of the bounded cache; set by the worker of this process before the pool is sized, and 0 once the draft K/V is
    allocated and out of the free memory. None where SGLang's own way is right.
    """

    def __init__(self) -> None:
        self.bounded_bytes: int | None = None
        self.is_bounded = False

    def pool_config(
        self, original: Any, configurator: Any, budget_bytes: int, **others: Any
    ) -> Any:
        """Around "bytes for KV to pool sizes": whichever way gives the target more tokens."""
        self.is_bounded = False
        by_token = original(configurator, budget_bytes, **others)
        if (
            self.bounded_bytes is None
            or configurator.is_draft_worker
            or budget_bytes <= self.bounded_bytes
        ):
            return by_token
        self.is_bounded = True
        bounded = original(configurator, budget_bytes - self.bounded_bytes, **others)
        self.is_bounded = bounded.max_total_num_tokens >= by_token.max_total_num_tokens
        return bounded if self.is_bounded else by_token

    def cell_size(self, original: Any, *, target_cell_size_per_token: int, **others: Any) -> int:
        """Around "target and draft bytes per token"."""
        if self.is_bounded:
            return target_cell_size_per_token
        return original(target_cell_size_per_token=target_cell_size_per_token, **others)

    def draft_cell_size(self, original: Any, configurator: Any) -> int:
        """Around "draft bytes per target token"."""
        return 0 if self.is_bounded else original(configurator)


draft_kv = DraftKVBudget()
