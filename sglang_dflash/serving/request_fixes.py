"""Request features that SGLang's DFLASH gets wrong or silently leaves out: fixed, or refused."""

from __future__ import annotations

from typing import Any


def refuse_hidden_states(original: Any, request: Any, enable_overlap: bool) -> str | None:
    """Around `validate_dflash_request`: refuse `return_hidden_states` without overlap too."""
    del enable_overlap
    return original(request, True)


def without_last_token(kept: bool, sessions: Any, request: Any) -> bool:
    """After a turn of a streaming session: do not count its last token's KV as computed.

    That token may be the target's own after the accepted drafts, which no forward has read. The
    next turn then computes it.
    """
    from sglang.srt.runtime_context import get_spec

    if kept and (get_spec().speculative_algorithm or "").upper() == "DFLASH":
        kv = sessions.slots[request.session.session_id].kv
        computed = len(request.origin_input_ids) + max(len(request.output_ids) - 1, 0)
        kv.kv_committed_len = min(kv.kv_committed_len, computed)
    return kept
