"""The report of a pair, for reading."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from sglang_dflash.memory.draft_memory import DraftMemory
from sglang_dflash.serving.metrics.server_info import BUILTIN
from sglang_dflash.tools.inspect.kv import GIB

_MEMORY = "memory of each GPU"
# Heading -> facts of it. Without those that are unknown or 0.
_GROUPS = {
    "target": ("target", "architecture", "layers", "dtype", "context", "hidden_size", "vocab_size"),
    "draft": (
        "draft", "kind", "head_bytes", "head_bytes_per_request", "architecture", "layers",
        "vocab_size", "dtype", "quantization", "context", "rope", "target_layer_ids",
        "mask_token_id", "tensors", "values",
    ),
    "served with": (
        "worker", "worker_reason", "block_size", "window", "sinks", "max_running_requests",
        "running_requests", "tp_size", "recurrent_rollback",
    ),
    # Where the memory of the KV pools is given; otherwise see `_memory`.
    _MEMORY: (
        "target_weight_bytes", "draft_weight_bytes", "draft_step_bytes", "kv_memory_bytes",
        "draft_kv_bytes",
    ),
    "draft steps": ("draft_memory_bytes",),
    "each token": ("target_kv_bytes_per_token", "draft_kv_bytes_per_token"),
    "each request": (
        "recurrent_state_bytes", "recurrent_replay_bytes", "recurrent_snapshot_bytes",
        "recurrent_slots", "running_requests_with_snapshots",
    ),
    "tokens of target KV": (
        "target_tokens", "target_tokens_unbounded", "target_tokens_without_draft",
    ),
    "requests at a time": (
        "requests_at_context", "requests_at_context_unbounded",
        "requests_at_context_without_draft",
    ),
    "draft KV": ("draft_kv_groups",),
}  # fmt: skip
_WORDS = {
    "target": "name",
    "draft": "name",
    "head_bytes": "head reads per step",
    "head_bytes_per_request": "and per request",
    "target_tokens": "as served",
    "target_tokens_unbounded": "with all draft KV kept",
    "target_tokens_without_draft": "without a draft",
    "requests_at_context": "as served",
    "requests_at_context_unbounded": "with all draft KV kept",
    "requests_at_context_without_draft": "without a draft",
    "draft_kv_groups": "groups",
    "draft_memory_bytes": "reserved",
}


def as_table(report: Mapping[str, Any], *, sources: bool = False) -> str:
    """The answer in words, then the facts in groups, byte counts in GiB or MiB. Facts that are
    unknown, empty or 0 have no line. Lines have up to 80 columns.

    Args:
        sources: also give the source of the facts.
    """
    suggested = report.get("suggestions")
    head = [
        report["verdict"],
        *([report["at_context"]] if report["at_context"] else []),
        *([_most_requests(suggested, report)] if suggested else []),
        _weights_verdict(report),
        report["assumptions"],
        *(f"warning: {text}" for text in report["warnings"]),
    ]
    lines = [_filled(text) for text in head]
    for heading, names in _GROUPS.items():
        if heading == _MEMORY and report["memory_bytes"] is not None:
            lines += ["", *_memory(report["memory_bytes"])]
            continue
        keys = {
            name: f"{heading}_{name}" if f"{heading}_{name}" in report else name for name in names
        }
        rows = [
            (_WORDS.get(name, name.replace("_bytes", "").replace("_", " ")), key)
            for name, key in keys.items()
            if report[key] not in (None, 0, "", [])
        ]
        lines += ["", heading] if rows else []
        for words, key in rows:
            start = f"  {words:<24}"
            text = _readable(key, report[key])
            lines += [_filled(f"{start} {text}", " " * 27)]
    lines += ["", *_suggestions(suggested)] if suggested else []
    return "\n".join([*lines, *(["", *report["sources"]] if sources else [])])


def _command(command: str) -> list[str]:
    """A launch command in lines; a flag and its value stay together."""
    program, *flags = command.split(" --")
    lines = [f"    {program}"]
    for flag in flags:
        if len(lines[-1]) + len(flag) > 74:
            lines.append("       ")
        lines[-1] += f" --{flag}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _most_requests(suggestions: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The most requests at a time: as served, with SGLang's worker, without a draft."""
    (_, served), *others = suggestions["most"].items()
    counts = f"{served}; {', '.join(f'{name} {count}' for name, count in others)}"
    bounds = "--max-running-requests"
    if report["recurrent_layers"]:
        bounds += " and --max-mamba-cache-size"
    return f"at most, with {bounds} for them: {counts}"


def _suggestions(suggestions: Mapping[str, Any]) -> list[str]:
    """The command for the most requests at a time, and other set-ups."""
    lines = list[str]()
    if suggestions["command"]:
        lines += ["launch command", "", *_command(suggestions["command"])]
    rows = suggestions["set_ups"]
    if rows:
        lines += [*[""] * bool(lines), "others, the cheapest first"]
        lines += [
            _filled(f"  {row['sessions']:>5}  {row['flags']} ({row['cost']})", " " * 9)
            for row in rows
        ]
    elif not suggestions["command"]:
        lines += ["no set-up that is known here runs as many"]
    return lines


def _memory(parts: Mapping[str, int]) -> list[str]:
    """The memory of a GPU, in lines whose numbers sum to the last one."""
    *named, (rest, _) = parts.items()
    shown = {name: round(n / GIB, 2) for name, n in named if n}
    total = round(sum(parts.values()) / GIB, 2)
    shown[f"{rest} (activations, CUDA graphs)"] = total - sum(shown.values())
    rows = [f"  {name:<44} {n:10,.2f}" for name, n in {**shown, "sum": total}.items()]
    return [f"{_MEMORY:<46} {'GiB':>10}", *rows]


def _filled(text: str, indent: str = "") -> str:
    # A flag is not cut.
    return textwrap.fill(text, 80, subsequent_indent=indent, break_on_hyphens=False)


def _weights_verdict(facts: Mapping[str, Any]) -> str:
    """Return which checks of the draft's weights were made."""
    if facts["worker"] == BUILTIN:
        return "draft weights: not checked, SGLang's worker reads them"
    if facts["draft_tensors"] is None:
        return "draft weights: not checked, only the config is known here"
    finite, later = "their values are finite", "values are checked when they are loaded"
    return (
        f"draft weights: {facts['draft_tensors']} tensors, with the names and shapes that the "
        f"config asks for; {finite if facts['draft_values'] else later}"
    )


def _readable(name: str, value: Any) -> str:
    if name == "draft_kv_groups":
        return "; ".join(map(_readable_group, value))
    if name == "draft_memory_bytes":
        return str(DraftMemory(**{part: value[part] for part in DraftMemory._fields}))
    if "bytes" in name:
        unit, size = ("GiB", GIB) if value >= GIB else ("MiB", GIB >> 10)
        return f"{value / size:,.3f} {unit}" if value >= GIB >> 10 else f"{value:,} bytes"
    return f"{value:,}" if isinstance(value, int) and not name.endswith("_id") else str(value)


def _readable_group(group: Mapping[str, Any]) -> str:
    count = len(group["layers"])
    readers = (
        "all layers read" if not count else f"{count} layers read" if count > 1 else "1 layer reads"
    )
    reads = f"the last {group['window']:,} tokens" if group["window"] else "all tokens"
    storage = (
        f"a ring of {group['entries']:,} entries" if group["ring"] else "an entry per target slot"
    )
    return f"{readers} {reads}: {storage}, {group['bytes'] / GIB:.3f} GiB"
