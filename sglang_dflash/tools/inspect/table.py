"""The report of a pair, for reading."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from sglang_dflash.memory.draft_memory import DraftMemory
from sglang_dflash.serving.metrics.server_info import BUILTIN, OURS
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
        "recurrent_slots",
    ),
    "draft KV": ("draft_kv_groups",),
}  # fmt: skip
# What is compared -> suffix of its facts.
_COMPARED = {"as served": "", "SGLang's worker": "_builtin", "without a draft": "_without_draft"}
_WORDS = {
    "target": "name",
    "draft": "name",
    "head_bytes": "head reads per step",
    "head_bytes_per_request": "and per request",
    "draft_kv_groups": "groups",
    "draft_memory_bytes": "reserved",
}


def as_table(report: Mapping[str, Any], *, sources: bool = False) -> str:
    """The verdict, the comparison with other servers, notes and warnings, then the facts in groups,
    byte counts in GiB or MiB. Facts that are unknown, empty or 0 have no line. Lines have up to 80
    columns.

    Args:
        sources: also give the source of the facts.
    """
    suggested = report.get("suggestions")
    notes = [
        *([report["at_context"]] if report["at_context"] else []),
        *([_sessions_verdict(suggested)] if suggested and suggested["sessions"] else []),
        _weights_verdict(report),
        report["assumptions"],
        *(f"warning: {text}" for text in report["warnings"]),
    ]
    lines = [_filled(report["verdict"]), "", *_comparison(report, suggested), ""]
    lines += [_filled(text) for text in notes]
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


def _comparison(report: Mapping[str, Any], suggested: Mapping[str, Any] | None) -> list[str]:
    """KV tokens and requests at a time as served, with SGLang's worker and without a draft."""
    is_builtin = report["worker"] == BUILTIN
    servers = [each for each in _COMPARED if not is_builtin or _COMPARED[each] != "_builtin"]

    def row(fact: str) -> list[int]:
        return [report[f"{fact}{_COMPARED[server]}"] for server in servers]

    rows = {
        "tokens of target KV": row("target_tokens"),
        "running requests": row("running_requests"),
    }
    if suggested:
        rows[f"  of {report['context']:,} tokens"] = row("requests_at_context")
        rows["  at most (*)"] = [suggested["most"][server] for server in servers]
    heads = [OURS if report["worker"] == OURS and not _COMPARED[each] else each for each in servers]
    lines = [" " * 28 + "".join(f"{head:>17}" for head in heads)]
    lines += [f"{name:<28}" + "".join(f"{n:>17,}" for n in row) for name, row in rows.items()]
    if suggested:
        states = " and --max-mamba-cache-size" if report["recurrent_layers"] else ""
        note = (
            f"(*) with --max-running-requests{states} for as many; all other figures are "
            f"with --max-running-requests {report['max_running_requests']}"
        )
        lines += [_filled(note, " " * 4)]
    return lines


def _suggestions(suggestions: Mapping[str, Any]) -> list[str]:
    """The launch command for the requests asked for, or for the most, and other set-ups."""
    command, rows = suggestions["command"], suggestions["set_ups"]
    others = ["other set-ups, the cheapest first (inspect with such flags prints the command)"]
    others += [
        _filled(f"  {row['sessions']:>5}  {row['flags']} ({row['cost']})", " " * 9) for row in rows
    ]
    if command:
        lines = ["launch command", "", *_command(command)]
        return [*lines, "", *others] if rows else lines
    if rows:
        return [*others, "", "launch command of the first", "", *_command(rows[0]["command"])]
    return ["no set-up that is known here runs as many"]


def _sessions_verdict(suggestions: Mapping[str, Any]) -> str:
    """Return whether the requests that were asked for run at a time."""
    subject = f"{suggestions['sessions']:,} requests at a time, as asked for:"
    if suggestions["command"]:
        return f"{subject} they fit, with the launch command below"
    most = suggestions["most"]["as served"]
    return f"{subject} they do not fit, {most:,} do; the last lines tell what would"


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
