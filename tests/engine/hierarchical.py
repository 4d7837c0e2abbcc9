"""Servers with a hierarchical cache: pools that hold some of the chats, and the host all of them.
What must not be read is poisoned (tests/reliability/watched.py)."""

from __future__ import annotations

from typing import Any

from tests.engine import servers as s
from tests.engine.checks import Seen, cached_tokens

HIERARCHICAL: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 8}
SMALL: dict[str, Any] = {**HIERARCHICAL, "max_total_tokens": 2400, "max_running_requests": 8}
WATCHED = {"speculative_dflash_extension": "tests.reliability.watched:extension"}

HOST_PLAIN = s.PLAIN.named("host-plain").having(**SMALL)
HOST = s.DFLASH.named("host").having(**SMALL, **WATCHED, **s.LOOKUP).with_env(**s.STRICT)
# Layers that slide beside others, in pages, by SGLang's other way of copying.
HOST_PAGES = (
    s.PAGES.named("host-pages")
    .having(**SMALL, **WATCHED, **s.MIXED)
    .having(
        disable_overlap_schedule=True,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_write_policy="write_back",
    )
    .with_env(**s.STRICT)
)
# Recurrent states come back, too.
HYBRID_PLAIN = s.HYBRID_PAIR_PLAIN.named("host-hybrid-plain").having(**SMALL)
HYBRID = {
    rollback: s.HYBRID_PAIR_DFLASH.named(f"host-hybrid-{rollback}")
    .having(**SMALL, **WATCHED, **s.LOOKUP, speculative_dflash_recurrent_rollback=rollback)
    .with_env(**s.STRICT)
    for rollback in ("replay", "snapshot")
}
SOAK_HOST = s.SOAK.named("soak-host").having(**HIERARCHICAL, max_total_tokens=8000)
SOAK_HYBRID_HOST = s.SOAK_HYBRID.named("soak-hybrid-host").having(
    **HIERARCHICAL, max_total_tokens=8000
)


def came_back(seen: Seen) -> None:
    """Most of the chats' history came from the host, with its draft K/V. Nothing poisoned was
    read."""
    cached, loaded = sum(cached_tokens(seen.ours["chats"])), seen.report["loaded_back_tokens"]
    assert loaded > cached / 2 > 2000
    assert seen.report["loaded_back_draft_kv"] > 0.9 * loaded
    assert seen.report["nonfinite_outputs"] == 0
    assert seen.report["rare_paths"]["poisoned entries"] > 0
