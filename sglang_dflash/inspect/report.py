"""What serving a pair takes: which worker serves it, and what its memory is spent on. No torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.facts import sizes
from sglang_dflash.facts.command_line import setting
from sglang_dflash.facts.draft_config import DraftConfig, draft_fields, draft_kv_shape
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.heads import head_bytes
from sglang_dflash.facts.published import ModelFacts
from sglang_dflash.facts.sizes import KV_DTYPES
from sglang_dflash.facts.target_config import TargetGeometry
from sglang_dflash.inspect.kv import GIB, draft_groups, split_kv
from sglang_dflash.inspect.pair import (
    BUILTIN,
    OURS,
    Judged,
    context_of,
    describe_draft,
    describe_target,
    judge,
    other_target,
)

_WIDTH = 120
# Far above any device, and below what makes the arithmetic overflow.
_MOST_GIB, _MOST_REQUESTS = 2**40, 2**20


@dataclass(frozen=True)
class Serving:
    """How the pair would be served. A GiB is 2**30 bytes.

    Raises:
        ConfigError: a value is out of range.
    """

    max_running_requests: int = setting(48, "requests that decode at a time (default: {default})")
    memory_gib: float = setting(80.0, "device memory, GiB (default: {default})")
    mem_fraction: float = setting(0.9, "fraction of it for weights and KV (default: {default})")
    kv_memory_gib: float | None = setting(
        None, "memory for both KV pools, GiB (default: what weights and recurrent states leave)"
    )
    kv_dtype: str | None = setting(None, "target KV (default: bfloat16)", choices=list(KV_DTYPES))
    draft_kv_dtype: str | None = setting(
        None, "draft KV (default: the target's)", choices=list(KV_DTYPES)
    )

    def __post_init__(self) -> None:
        gib = f"a number of GiB above 0 and up to {_MOST_GIB} is required"
        dtypes = f"choose one of {', '.join(KV_DTYPES)}"
        checks = (
            (
                "max_running_requests",
                lambda n: 1 <= n <= _MOST_REQUESTS,
                f"a number from 1 to {_MOST_REQUESTS} is required",
            ),
            ("mem_fraction", lambda x: 0 < x <= 1, "a fraction above 0 and up to 1 is required"),
            ("memory_gib", lambda x: 0 < x <= _MOST_GIB, gib),
            ("kv_memory_gib", lambda x: x is None or 0 < x <= _MOST_GIB, gib),
            ("kv_dtype", lambda name: name is None or name in KV_DTYPES, dtypes),
            ("draft_kv_dtype", lambda name: name is None or name in KV_DTYPES, dtypes),
        )
        for name, is_valid, required in checks:
            if not is_valid(getattr(self, name)):
                raise ConfigError(name, getattr(self, name), required)


def inspect(
    target: ModelFacts,
    draft: ModelFacts,
    options: Options,
    serving: Serving,
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What serving this pair would cost.

    Args:
        names: setting -> what the user types for it, for warnings.

    Returns:
        Every fact of docs/inspect.md by name, None if it is unknown; sizes are in bytes.

    Raises:
        ConfigError: the pair or an option does not fit, a needed fact is unknown, or no memory is
            left for KV.
    """
    judged, context = judge(target, draft), context_of(target)
    geometry, config = judged.geometry, judged.config
    resolved = replace(_resolve(options, draft, config), context=context)
    requests, block_size = serving.max_running_requests, resolved.block_size
    target_kv, draft_kv = _kv_bytes(target, draft, judged, serving)
    recurrent = _recurrent(geometry, judged.worker, block_size)
    steps = _step_bytes(judged, resolved, requests, context)
    weights = sizes.draft_weight_bytes(config) if config else draft.weight_bytes
    states = sum(recurrent[f"recurrent_{part}_bytes"] or 0 for part in ("state", "replay"))
    memory = _kv_memory(serving, target.weight_bytes, weights, requests * states, steps or 0)
    kv = split_kv(memory, target_kv, draft_groups(judged, resolved, draft_kv, requests))
    options.check_room(resolved, context=context, kv_tokens=kv["target_tokens"])
    warnings = [*other_target(target.name, draft.name), *_config_only(draft)]
    facts = {
        "warnings": warnings + (resolved.warnings(config, context, names or {}) if config else []),
        "target": target.name,
        "draft": draft.name,
        "worker": judged.worker,
        "worker_reason": judged.reason,
        **describe_target(target, geometry),
        **describe_draft(draft, config),
        "block_size": block_size,
        "window": resolved.reach.tokens,
        "sinks": resolved.reach.sinks,
        "max_running_requests": requests,
        "target_kv_bytes_per_token": target_kv,
        "draft_kv_bytes_per_token": draft_kv,
        "kv_memory_bytes": memory,
        "target_weight_bytes": target.weight_bytes,
        "draft_weight_bytes": weights,
        "draft_step_bytes": steps,
        **_head_bytes(config, block_size),
        "draft_tensors": len(draft.tensors) if config and draft.tensors else None,
        "draft_values": "finite" if config and draft.weights else None,
        **recurrent,
        **kv,
        "sources": [f"target: {target.source}", f"draft: {draft.source}"],
    }
    return {"verdict": _verdict(facts), "assumptions": _assumptions(serving), **facts}


def _config_only(draft: ModelFacts) -> list[str]:
    """A warning if the draft's folder has no weights."""
    if draft.config is None or draft.tensors is not None or not Path(draft.name).is_dir():
        return []
    return [
        f"config only: {draft.name} has no weights, so they are not judged, and a server needs "
        "them (or --load-format dummy)"
    ]


def _resolve(options: Options, draft: ModelFacts, config: DraftConfig | None) -> ResolvedOptions:
    """With the draft's block size. Raises ConfigError if it is unknown and not given."""
    trained = None if config is None else config.block_size
    if config is None and draft.config is not None:
        fields = draft_fields(draft.config)
        trained = fields.positive_int("block_size") if "block_size" in fields else None
    return options.for_trained_block(trained)


def _kv_memory(
    serving: Serving, target: int | None, draft: int | None, states: int, steps: int
) -> int:
    """Bytes for both KV pools: what weights, recurrent states and draft steps leave."""
    if serving.kv_memory_gib is not None:
        return int(serving.kv_memory_gib * GIB)
    if target is None or draft is None:
        unknown = "target" if target is None else "draft"
        raise ConfigError(
            "kv_memory_gib", None, f"required, because the size of the {unknown}'s weights is not "
            "known",
        )  # fmt: skip
    weights = target + draft
    left = int(serving.memory_gib * serving.mem_fraction * GIB) - weights - states - steps
    if left <= 0:
        raise ConfigError(
            "memory_gib",
            serving.memory_gib,
            f"with {{mem_fraction}} {serving.mem_fraction:g}, {weights / GIB:.2f} GiB of weights, "
            f"{states / GIB:.2f} GiB of recurrent state and {steps / GIB:.2f} GiB of draft steps "
            "leave nothing for KV; give more, or fewer requests",
        )
    return left


def _step_bytes(
    judged: Judged, options: ResolvedOptions, requests: int, context: int | None
) -> int | None:
    """What our worker reserves for draft steps; None if another worker serves."""
    if judged.worker != OURS or judged.config is None:
        return None
    reaches = [group.reach for group in judged.config.groups(options.reach)]
    return sizes.draft_memory(
        judged.config,
        block_size=options.block_size,
        requests=requests,
        columns=sum(reach.of(context or (reach.tokens or 0) + reach.sinks) for reach in reaches),
        recorded=requests,
    ).total


def _head_bytes(config: DraftConfig | None, block_size: int) -> dict[str, int | None]:
    """What the head of DFlash2 adds to what a proposal reads; None for what is not known."""
    if config is None:
        return dict.fromkeys(("draft_head_bytes", "draft_head_bytes_per_request"))
    once, per_request = head_bytes(config, block_size, KV_DTYPES["bfloat16"])
    return {"draft_head_bytes": once, "draft_head_bytes_per_request": per_request}


def _kv_bytes(
    target: ModelFacts, draft: ModelFacts, judged: Judged, serving: Serving
) -> tuple[int, int]:
    """KV bytes of one token, of the target and of the draft."""
    itemsize = KV_DTYPES[serving.kv_dtype or "bfloat16"]
    if judged.geometry is not None:
        of_target = sizes.target_kv_bytes(judged.geometry, itemsize)
    else:
        of_target = _stated_kv_bytes(target, "kv_dtype", serving.kv_dtype)
    if draft.config is None:
        return of_target, _stated_kv_bytes(draft, "draft_kv_dtype", serving.draft_kv_dtype)
    config = judged.config
    shape = config.kv_shape if config else draft_kv_shape(draft_fields(draft.config))
    return of_target, KV_DTYPES.get(serving.draft_kv_dtype or "", itemsize) * math.prod(shape)


def _recurrent(geometry: TargetGeometry | None, worker: str, block_size: int) -> dict[str, Any]:
    """The facts of recurrent layers."""
    shape, layers = (geometry.recurrent, geometry.recurrent_layers) if geometry else (None, None)
    rollback = "replay" if shape is not None and worker == OURS else "snapshot"
    return {
        "recurrent_layers": layers,
        "recurrent_rollback": rollback if layers else None,
        "recurrent_state_bytes": sizes.state_bytes(shape)
        if shape
        else (None if layers else layers),
        "recurrent_snapshot_bytes": sizes.snapshot_bytes(shape, block_size) if shape else None,
        "recurrent_replay_bytes": sizes.replay_bytes(shape, block_size) if shape else None,
    }


def _stated_kv_bytes(facts: ModelFacts, field: str, dtype: str | None) -> int:
    """KV bytes of one token of a model without a config."""
    if facts.kv_bytes_per_token is None:
        raise ConfigError(facts.name, required="neither a config nor kv_bytes_per_token is known")
    if dtype is not None:
        raise ConfigError(
            field, dtype, f"of {facts.name} only the KV bytes as measured are known; leave it out"
        )
    return facts.kv_bytes_per_token


# ---- for reading


def as_table(report: Mapping[str, Any], *, sources: bool = False) -> str:
    """The answer in words, then one aligned line per fact, byte counts also in GiB. Facts that are
    unknown, empty or 0 have no line. Lines have up to 120 columns.

    Args:
        sources: also give the source of the facts.
    """
    words = ("verdict", "assumptions", "warnings", "sources")
    facts = {
        name: _readable(name, value)
        for name, value in report.items()
        if name not in words and value not in (None, 0, "", [])
    }
    head = [
        report["verdict"],
        _weights_verdict(report),
        report["assumptions"],
        *(f"warning: {text}" for text in report["warnings"]),
    ]
    width = max(map(len, facts))
    rows = [*facts.items(), *(("source", text) for text in report["sources"] if sources)]
    indent = " " * (width + 2)
    lines = [
        textwrap.fill(f"{name:<{width}}  {text}", _WIDTH, subsequent_indent=indent)
        for name, text in rows
    ]
    return "\n".join([*(textwrap.fill(text, _WIDTH) for text in head), "", *lines])


def _verdict(facts: Mapping[str, Any]) -> str:
    """Who serves the pair, and what its draft KV costs the target."""
    worker, window = facts["worker"], facts["window"]
    who = f"which worker serves is not known: {facts['worker_reason']}"
    if worker == OURS:
        who = "served by sglang-dflash"
    elif worker == BUILTIN:
        who = f"served by SGLang's built-in worker, because of {facts['worker_reason']}"
    draft, target = facts["draft_kv_bytes_per_token"], facts["target_kv_bytes_per_token"]
    share = f"its draft KV takes {_percent(draft / (draft + target))} of the KV memory"
    if worker == BUILTIN:
        return f"{who}; {share}, whatever the window"
    groups = facts["draft_kv_groups"]
    most = f"up to +{_percent(facts['target_tokens_gain_ceiling'])} KV tokens for the target"
    if all(group["window"] is None for group in groups):
        return f"{who}; without --window {share}, a window leaves {most}"
    slides = sum(len(group["layers"]) for group in groups if group["window"])
    depth = sum(len(group["layers"]) for group in groups)
    what = f"window {window}" if window else f"{slides} of {depth} draft layers slide"
    if not any(group["ring"] for group in groups):
        return (
            f"{who}; {what}, which frees nothing: {facts['max_running_requests']} running "
            "requests need as many draft entries as the target has KV tokens "
            f"({facts['target_tokens']:,})"
        )
    before, after = (
        f"{facts[name] / GIB:.1f} GiB" for name in ("draft_kv_bytes_unbounded", "draft_kv_bytes")
    )
    gain = _percent(facts["target_tokens_gain"])
    left = f"{who}; {what}: {before} of draft KV become {after}, +{gain} KV tokens for the target"
    return left if slides == depth else f"{left} (--window: {most})"


def _weights_verdict(facts: Mapping[str, Any]) -> str:
    """What was checked of the draft's weights."""
    if facts["worker"] == BUILTIN:
        return "draft weights: not checked, SGLang's worker reads them"
    if facts["draft_tensors"] is None:
        return "draft weights: not checked, only the config is known here"
    finite, later = "their values are finite", "values are checked when they are loaded"
    return (
        f"draft weights: {facts['draft_tensors']} tensors, with the names and shapes that the "
        f"config asks for; {finite if facts['draft_values'] else later}"
    )


def _assumptions(serving: Serving) -> str:
    """What the figures are for, with the flags that change it."""
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
    if name == "draft_kv_groups":
        return "; ".join(map(_readable_group, value))
    if "gain" in name:
        return f"{value:.2%}"
    if "bytes" in name and value >= GIB // 1024:
        return f"{value:,} ({value / GIB:.3f} GiB)"
    return f"{value:,}" if isinstance(value, int) and not name.endswith("_id") else str(value)


def _readable_group(group: Mapping[str, Any]) -> str:
    count = f"{len(group['layers']) or 'all'} layers"
    reads = f"the last {group['window']:,} tokens" if group["window"] else "all tokens"
    kind = (
        f"a ring of {group['entries']:,} entries" if group["ring"] else "an entry per target slot"
    )
    return f"{count} read {reads}: {kind}, {group['bytes'] / GIB:.3f} GiB"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
