"""What was found of a pair, for reading and as one object for JSON."""

from __future__ import annotations

import textwrap
from typing import Any

from sglang_dflash.inspect.findings import GIB, Findings
from sglang_dflash.inspect.pair import BUILTIN, OURS

_WIDTH = 120


def as_json(found: Findings) -> dict[str, Any]:
    """The answer in words, then every fact."""
    return {"verdict": verdict(found), "assumptions": assumptions(found), **found.facts()}


def as_table(found: Findings, *, sources: bool = False) -> str:
    """The answer in words, then one aligned line per fact, byte counts also in GiB. Facts that are
    unknown, empty or 0 have no line. Lines have up to 120 columns.

    Args:
        sources: also give the source of the facts.
    """
    facts = [
        (name, _readable(name, value))
        for name, value in found.facts().items()
        if name not in ("warnings", "sources") and value not in (None, 0, "", [])
    ]
    width = max(len(name) for name, _ in facts)
    head = [
        verdict(found),
        weights_verdict(found),
        assumptions(found),
        *(f"warning: {text}" for text in found.warnings),
    ]
    lines = [f"{name:<{width}}  {text}" for name, text in facts]
    indent = " " * (width + 2)
    notes = [
        textwrap.fill(f"{'source':<{width}}  {text}", _WIDTH, subsequent_indent=indent)
        for text in (found.sources if sources else ())
    ]
    return "\n".join([*(textwrap.fill(text, _WIDTH) for text in head), "", *lines, *notes])


def verdict(found: Findings) -> str:
    """Who serves the pair, and what its draft KV costs the target."""
    who, kv = f"which worker serves is not known: {found.worker_reason}", found.kv
    if found.worker == OURS:
        who = "served by sglang-dflash"
    elif found.worker == BUILTIN:
        who = f"served by SGLang's built-in worker, because of {found.worker_reason}"
    draft, target = found.draft_kv_bytes_per_token, found.target_kv_bytes_per_token
    share = f"its draft KV takes {_percent(draft / (draft + target))} of the KV memory"
    if found.worker == BUILTIN:
        return f"{who}; {share}, whatever the window"
    if found.window is None:
        most = _percent(kv.target_tokens_gain_ceiling)
        return (
            f"{who}; without --window {share}, a window leaves up to +{most} KV tokens for the "
            "target"
        )
    if kv.draft_kv_map != "bounded":
        return (
            f"{who}; window {found.window} frees nothing: {found.max_running_requests} running "
            "requests need as many draft entries as the target has KV tokens "
            f"({kv.target_tokens:,})"
        )
    gain = _percent(kv.target_tokens_gain)
    return f"{who}; window {found.window} leaves +{gain} KV tokens for the target"


def weights_verdict(found: Findings) -> str:
    """What was checked of the draft's weights."""
    if found.worker == BUILTIN:
        return "draft weights: not checked, SGLang's worker reads them"
    if found.draft_tensors is None:
        return "draft weights: not checked, only the config is known here"
    finite, later = "their values are finite", "values are checked when they are loaded"
    return (
        f"draft weights: {found.draft_tensors} tensors, with the names and shapes that the config "
        f"asks for; {finite if found.draft_values else later}"
    )


def assumptions(found: Findings) -> str:
    """What the figures are for, with the flags that change it."""
    serving = found.serving
    memory = f"{serving.kv_memory_gib or 0:g} GiB for both KV pools (--kv-memory-gib)"
    if serving.kv_memory_gib is None:
        memory = (
            f"{serving.memory_gib:g} GiB x {serving.mem_fraction:g} of device memory "
            "(--memory-gib, --mem-fraction)"
        )
    return (
        f"computed for {memory}, {serving.max_running_requests} running requests "
        f"(--max-running-requests), {serving.kv_dtype or 'bfloat16'} KV (--kv-dtype)"
    )


def _readable(name: str, value: Any) -> str:
    if "gain" in name:
        return f"{value:.2%}"
    if "bytes" in name and value >= GIB // 1024:
        return f"{value:,} ({value / GIB:.3f} GiB)"
    return f"{value:,}" if isinstance(value, int) and not name.endswith("_id") else str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
