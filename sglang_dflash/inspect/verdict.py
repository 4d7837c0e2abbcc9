"""The answer of a pre-flight report in words."""

from __future__ import annotations

from sglang_dflash.facts.published import collection
from sglang_dflash.inspect.memory import KvSplit, Serving


def verdict(
    worker: str, reason: str | None, kv: KvSplit, *, window: int | None, requests: int
) -> str:
    """Who serves the pair, and what its draft KV costs the target.

    Args:
        worker, reason: as in `Inspection`.
        requests: `max_running_requests`.
    """
    who = {
        "sglang-dflash": "served by sglang-dflash",
        "builtin": f"served by SGLang's built-in worker, because of {reason}",
    }.get(worker, f"which worker serves is not known: {reason}")
    share = _percent(kv.draft_kv_bytes_unbounded / _total_bytes(kv))
    if worker == "builtin":
        return f"{who}; its draft KV takes {share} of the KV memory, whatever the window"
    if window is None:
        return (
            f"{who}; without --window its draft KV takes {share} of the KV memory, a window leaves "
            f"up to +{_percent(kv.target_tokens_gain_ceiling)} KV tokens for the target"
        )
    if not kv.bounded:
        return (
            f"{who}; window {window} frees nothing: {requests} running requests need as many draft "
            f"entries as the target has KV tokens ({kv.target_tokens:,})"
        )
    gain = _percent(kv.target_tokens_gain)
    return f"{who}; window {window} leaves +{gain} KV tokens for the target"


def assumptions(serving: Serving) -> str:
    """What the figures are for, with the flags that change it."""
    if serving.kv_memory_gib is None:
        memory = (
            f"{serving.memory_gib:g} GiB x {serving.mem_fraction:g} of device memory "
            "(--memory-gib, --mem-fraction)"
        )
    else:
        memory = f"{serving.kv_memory_gib:g} GiB for both KV pools (--kv-memory-gib)"
    return (
        f"computed for {memory}, {serving.max_running_requests} running requests "
        f"(--max-running-requests), {serving.kv_dtype or 'bfloat16'} KV (--kv-dtype)"
    )


def other_target(target: str, draft: str) -> str | None:
    """A warning if the collection lists the draft for other targets; None if it does not."""
    listed = [
        pair.target
        for pair in collection().pairs
        if draft.casefold() in (name.casefold() for name in pair.drafts)
    ]
    if not listed or target.casefold() in (name.casefold() for name in listed):
        return None
    return (
        f"{draft} is published for {' and '.join(listed)}, not for {target}; with another "
        "target outputs stay exact, but few drafted tokens may be accepted"
    )


def weights_verdict(worker: str, tensors: int | None, values: str | None) -> str:
    """What was checked of the draft's weights.

    Args:
        tensors, values: `draft_tensors` and `draft_values` of `Inspection`.
    """
    if worker == "builtin":
        return "draft weights: not checked, SGLang's worker reads them"
    if tensors is None:
        return "draft weights: not checked, only the config is known here"
    found = "their values are finite" if values else "values are checked when they are loaded"
    return (
        f"draft weights: {tensors} tensors, with the names and shapes that the config asks for; "
        f"{found}"
    )


def _total_bytes(kv: KvSplit) -> float:
    """Of both KV pools with a draft entry per target token."""
    return kv.draft_kv_bytes_unbounded * (1 + 1 / kv.target_tokens_gain_ceiling)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
