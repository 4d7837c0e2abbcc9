"""The report of a pair in words: its verdict, and what it warns of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.published import ModelFacts
from sglang_dflash.serving.metrics.server_info import BUILTIN, OURS


def verdict(facts: Mapping[str, Any]) -> str:
    """Return which worker serves the pair, and how many tokens its draft KV leaves the target."""
    worker = facts["worker"]
    subject = f"which worker serves is not known: {facts['worker_reason']}"
    if worker == OURS:
        subject = "served by sglang-dflash"
    elif worker == BUILTIN:
        subject = f"served by SGLang's built-in worker, because of {facts['worker_reason']}"
    served, all_kept, without = (
        f"{facts[f'target_tokens{suffix}']:,}" for suffix in ("", "_unbounded", "_without_draft")
    )
    tokens, most = f"{served} tokens of target KV", _percent(facts["target_tokens_gain_ceiling"])
    if worker == BUILTIN:
        return f"{subject}: {tokens}, whatever the window; {without} without a draft"
    groups = facts["draft_kv_groups"]
    slides = sum(len(group["layers"]) for group in groups if group["window"])
    depth = sum(len(group["layers"]) for group in groups)
    window = (
        f"window {facts['window']}"
        if facts["window"]
        else f"{slides} of {depth} draft layers slide"
    )
    if not slides and not facts["window"]:
        return f"{subject}: {tokens}; with --window up to +{most}; {without} without a draft"
    if not any(group["ring"] for group in groups):
        return (
            f"{subject}: {tokens}; {window}, which frees nothing: {facts['running_requests']} "
            f"running requests need as many draft entries; {without} without a draft"
        )
    gain = _percent(facts["target_tokens_gain"])
    windowed = "" if slides == depth else f"; with --window up to +{most}"
    return (
        f"{subject}: {tokens}, since {window}; {all_kept} if all draft KV were kept (+{gain}); "
        f"{without} without a draft{windowed}"
    )


def at_context(facts: Mapping[str, Any]) -> str | None:
    """Return how many requests of the asked length run at a time; None if no length was asked
    for."""
    if facts["context"] is None:
        return None
    served, all_kept, without = (
        facts[f"requests_at_context{suffix}"] for suffix in ("", "_unbounded", "_without_draft")
    )
    bound = "the KV tokens bound it"
    if served == facts["running_requests"]:
        bound = "--max-running-requests bounds it"
        if served < facts["max_running_requests"]:
            bound = "recurrent states bound it"
    return (
        f"requests of {facts['context']:,} tokens that run at a time: {served} ({bound}); "
        f"{all_kept} if all draft KV were kept; {without} without a draft"
    )


def capped(memory: Mapping[str, Any], max_running: int) -> list[str]:
    """A warning if fewer requests run at a time than are asked for."""
    slots, running = memory["recurrent_slots"], memory["running_requests"]
    if running == max_running:
        return []
    return [
        f"--max-running-requests {max_running}: SGLang runs {running} at a time, for it keeps "
        f"{slots} recurrent states (--mamba-full-memory-ratio 0.9); --max-mamba-cache-size gives "
        "another number of them"
    ]


def extended(max_positions: int | None, context_length: int | None) -> list[str]:
    """A warning if requests may be longer than the target's config says."""
    if max_positions is None or context_length is None or context_length <= max_positions:
        return []
    return [
        f"--context-length {context_length}: the target's max_position_embeddings is "
        f"{max_positions}; SGLang refuses to start unless the config that it reads extends it, as "
        "by YaRN"
    ]


def config_only(draft: ModelFacts) -> list[str]:
    """A warning if the draft's folder has no weights."""
    if draft.tensors is not None or not Path(draft.name).is_dir():
        return []
    return [
        f"config only: {draft.name} has no weights, so they are not judged, and a server needs "
        "them (or --load-format dummy)"
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
