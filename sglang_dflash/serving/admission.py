"""When new requests are admitted: SGLang's wait for several free request slots is not for our worker.

SGLang 0.5.23 holds new requests back under DFLASH until 2 to 4 running ones have finished, because its draft prefill is
expensive. Ours projects a window; what the wait costs and saves is measured by `sglang_dflash.bench.admission`.
"""

from __future__ import annotations

from typing import Any

# Set by the worker of this process before the scheduler asks.
our_worker_serves = False


def min_free_slots(original: Any, user_value: int | None, max_running_requests: int, is_dflash_family: bool = False) -> int | None:
    """Hook around SGLang's rule: what --min-free-slots-delay says stays; its own default for DFLASH does not."""
    return original(user_value, max_running_requests, is_dflash_family=is_dflash_family and not our_worker_serves)
