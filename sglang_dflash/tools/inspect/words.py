"""The report of a pair in words: its verdict, and what it warns of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.published import ModelFacts, repository_of
from sglang_dflash.memory.pools import STATES_PER_REQUEST
from sglang_dflash.serving.metrics.server_info import BUILTIN, OURS


def verdict(facts: Mapping[str, Any]) -> str:
    """Return which worker serves the pair, and what its draft layers keep."""
    if facts["worker"] == BUILTIN:
        return f"served by SGLang's built-in worker, because of {facts['worker_reason']}"
    subject = "served by sglang-dflash"
    if facts["worker"] != OURS:
        subject = f"which worker serves is not known: {facts['worker_reason']}"
    groups = facts["draft_kv_groups"]
    bounded = sum(len(group["layers"]) for group in groups if group["window"])
    depth = sum(len(group["layers"]) for group in groups)
    if not bounded:
        most = f"{100 * facts['target_tokens_gain_ceiling']:.1f} %"
        return (
            f"{subject}; every draft layer reads the whole context, and keeps its K/V: --window "
            f"bounds it, for up to {most} more KV tokens"
        )
    layers = f"{bounded} of {depth} draft layers have a window"
    if not any(group["ring"] for group in groups):
        return (
            f"{subject}; {layers}, which frees nothing here: {facts['running_requests']} running "
            "requests see as many tokens as the target's pool holds"
        )
    return f"{subject}; {layers}, and keep only what running requests see"


def at_context(facts: Mapping[str, Any]) -> str | None:
    """Return how many requests of the asked length run at a time, and what bounds them; None if no
    length was asked for."""
    if facts["context"] is None:
        return None
    served = facts["requests_at_context"]
    bound = "the KV tokens bound it"
    if served == facts["running_requests"]:
        bound = "--max-running-requests bounds it"
        if served < facts["max_running_requests"]:
            bound = "recurrent states bound it"
    return f"requests of {facts['context']:,} tokens that run at a time: {served} ({bound})"


def capped(memory: Mapping[str, Any], max_running: int) -> list[str]:
    """A warning if fewer requests run at a time than are asked for."""
    slots, running = memory["recurrent_slots"], memory["running_requests"]
    if running == max_running:
        return []
    return [
        f"--max-running-requests {max_running}: {running} run at a time with this worker, for "
        f"{slots} recurrent states carry no more ({STATES_PER_REQUEST} each); "
        f"--max-mamba-cache-size {max_running * STATES_PER_REQUEST} carries {max_running}, and "
        "takes memory from K/V"
    ]


def extended(context_length: int | None, target: int | None, draft: int | None) -> list[str]:
    """Warnings if requests may be longer than a config says.

    Args:
        target: its context.
        draft: its max_position_embeddings.
    """
    advice = {
        "target's context": (target, "unless the config that it reads extends it, as by YaRN"),
        "draft's max_position_embeddings": (
            draft,
            "with the flag, and serves the target's own length without it",
        ),
    }
    return [
        f"--context-length {context_length}: the {bound} is {positions}; "
        f"SGLang refuses to start {remedy}"
        for bound, (positions, remedy) in advice.items()
        if context_length is not None and positions is not None and context_length > positions
    ]


def earlier_revision(draft: str) -> list[str]:
    """A warning if the draft is not the newest one of its repository."""
    repository = repository_of(draft)
    if repository == draft:
        return []
    return [
        f"{draft} is an earlier revision of {repository}: a server needs its commit, as "
        "--speculative-draft-model-revision COMMIT"
    ]


def config_only(draft: ModelFacts) -> list[str]:
    """A warning if the draft's folder has no weights."""
    if draft.tensors is not None or not Path(draft.name).is_dir():
        return []
    return [
        f"config only: {draft.name} has no weights, so they are not judged, and a server needs "
        "them (or --load-format dummy)"
    ]
