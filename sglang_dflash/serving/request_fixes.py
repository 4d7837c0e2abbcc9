"""Request features that SGLang, under DFLASH, gets wrong or leaves out without a word: put right, or refused."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register_hooks() -> None:
    HookRegistry.register(
        "sglang.srt.speculative.dflash_utils.validate_dflash_request",
        refuse_hidden_states,
        HookType.AROUND,
    )
    turn_ends = "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req"
    HookRegistry.register(turn_ends, without_last_token, HookType.AFTER)


def refuse_hidden_states(original: Any, request: Any, enable_overlap: bool) -> str | None:
    """SGLang refuses `return_hidden_states` under overlap scheduling only; without it the answer would have an empty list."""
    del enable_overlap
    return original(request, True)


def without_last_token(kept: bool, sessions: Any, request: Any) -> bool:
    """After a turn of a streaming session: its last token's KV counts as not computed yet, so the next turn computes it.

    That token may be the target's own after the drafts accepted, which no forward has seen; SGLang would have the next turn
    attend to whatever its slot held before.
    """
    from sglang.srt.runtime_context import get_spec

    if kept and (get_spec().speculative_algorithm or "").upper() == "DFLASH":
        kv = sessions.slots[request.session.session_id].kv
        computed = len(request.origin_input_ids) + max(len(request.output_ids) - 1, 0)
        kv.kv_committed_len = min(kv.kv_committed_len, computed)
    return kept
