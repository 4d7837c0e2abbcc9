"""The pre-flight report of a pair: who serves it, its weights, KV bytes per token, and the target
tokens that fit."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.facts import sizes
from sglang_dflash.facts.fields import Fields
from sglang_dflash.facts.published import ModelFacts
from sglang_dflash.facts.target_config import TargetGeometry
from sglang_dflash.inspect.description import (
    DraftDescription,
    TargetDescription,
    describe_draft,
    describe_target,
)
from sglang_dflash.inspect.known_draft import KnownDraft
from sglang_dflash.inspect.memory import (
    GIB,
    KvSplit,
    Serving,
    kv_memory_bytes,
    split_kv,
    stated_kv_bytes,
)
from sglang_dflash.inspect.verdict import (
    assumptions,
    other_target,
    verdict,
    weights_verdict,
)

# Facts in words: they stand above the table.
_HEAD = ("verdict", "assumptions", "warnings")


@dataclass(frozen=True)
class Inspection:
    """The report. Every size is in bytes; None if unknown.

    Attributes:
        verdict: who serves the pair and what its draft KV costs the target, in words.
        assumptions: the memory, requests and KV dtype that the figures are for, in words.
        warnings: the draft is published for another target; a block, a window or a context is
            larger than what the draft was made for.
        worker: what serves the pair without further flags: "sglang-dflash", "builtin" (SGLang's
            own worker; the bounded figures are then those of ours) or "unknown".
        worker_reason: why it is not "sglang-dflash".
        draft_step_bytes: what our worker reserves beside weights and K/V (`drafter_bytes`); None if
            another worker serves.
        draft_tensors: how many tensors of the draft's weights were checked against its config; None
            if there are no weights at hand.
        draft_values: "finite" if the values of these tensors were read and are finite; None if only
            headers are at hand.
        recurrent_rollback: how that worker follows an accepted prefix in recurrent layers; None if
            there are none.
        recurrent_state_bytes: of one request.
        recurrent_snapshot_bytes: scratch of one request's verification with rollback by snapshots.
        recurrent_replay_bytes: the same with rollback by replay.
    """

    verdict: str
    assumptions: str
    warnings: list[str]
    target: str
    draft: str
    worker: str
    worker_reason: str | None
    target_description: TargetDescription
    draft_description: DraftDescription
    block_size: int
    window: int | None
    sinks: int
    max_running_requests: int
    target_kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    kv_memory_bytes: int
    kv: KvSplit
    target_weight_bytes: int | None
    draft_weight_bytes: int | None
    draft_step_bytes: int | None
    draft_tensors: int | None
    draft_values: str | None
    recurrent_layers: int | None
    recurrent_rollback: str | None
    recurrent_state_bytes: int | None
    recurrent_snapshot_bytes: int | None
    recurrent_replay_bytes: int | None
    sources: list[str]

    def report(self) -> dict[str, Any]:
        """All fields in one flat dictionary, sources last."""
        facts = asdict(self)
        names = (*_HEAD, "target", "draft", "worker", "worker_reason")
        head = {name: facts.pop(name) for name in names}
        described = {**facts.pop("target_description"), **facts.pop("draft_description")}
        split, sources = facts.pop("kv"), facts.pop("sources")
        split["draft_kv_map"] = "bounded" if split.pop("bounded") else "one entry per target slot"
        return {**head, **described, **facts, **split, "sources": sources}


@dataclass(frozen=True)
class DraftInspection:
    """`worker` and `reason` as in `Inspection`, as far as the draft decides them."""

    worker: str
    reason: str | None
    block_size: int | None
    description: DraftDescription


def inspect(
    target: ModelFacts, draft: ModelFacts, options: Options, serving: Serving
) -> Inspection:
    """Compute what serving this pair would cost.

    Raises:
        ConfigError: the pair does not fit, an option is out of range, a needed fact is unknown, or
            no memory is left for KV.
    """
    geometry = None if target.config is None else TargetGeometry.from_dict(target.config)
    recurrent = geometry.recurrent if geometry else None
    target_bytes = (
        sizes.target_kv_bytes(geometry, serving.kv_dtype_bytes)
        if geometry
        else stated_kv_bytes(target, "--kv-dtype", serving.kv_dtype)
    )
    known = _checked(draft, serving, geometry)
    resolved = known.resolve(options)
    reach, block_size = resolved.reach, resolved.block_size
    replay = sizes.replay_bytes(recurrent, block_size) if recurrent else None
    state = sizes.state_bytes(recurrent) if recurrent else 0
    states = state + (replay or 0)
    weights = {"target": target.weight_bytes, "draft": known.weight_bytes}
    worker, reason = _worker(target, geometry, known)
    ours = worker == "sglang-dflash"
    reserved = known.step_bytes(resolved, serving, _context(target)) if ours else None
    memory = kv_memory_bytes(serving, weights, states, reserved or 0)
    entries = resolved.draft_kv_entries(serving.max_running_requests)
    kv = split_kv(memory, target_bytes, known.kv_bytes_per_token, entries)
    options.check_room(resolved, context=_context(target), kv_tokens=kv.target_tokens)
    requests = serving.max_running_requests
    return Inspection(
        verdict=verdict(worker, reason, kv, window=reach.tokens, requests=requests),
        assumptions=assumptions(serving),
        warnings=_warnings(target, draft, known, resolved),
        target=target.name,
        draft=draft.name,
        worker=worker,
        worker_reason=reason,
        target_description=describe_target(target.config, geometry),
        draft_description=describe_draft(draft.config, known.config),
        block_size=block_size,
        window=reach.tokens,
        sinks=reach.sinks,
        max_running_requests=requests,
        target_kv_bytes_per_token=target_bytes,
        draft_kv_bytes_per_token=known.kv_bytes_per_token,
        kv_memory_bytes=memory,
        kv=kv,
        target_weight_bytes=target.weight_bytes,
        draft_weight_bytes=known.weight_bytes,
        draft_step_bytes=reserved,
        draft_tensors=known.checked_tensors,
        draft_values=known.checked_values,
        recurrent_layers=geometry.recurrent_layers if geometry else None,
        recurrent_rollback=_rollback(geometry, worker),
        recurrent_state_bytes=_state_bytes(geometry),
        recurrent_snapshot_bytes=sizes.snapshot_bytes(recurrent, block_size) if recurrent else None,
        recurrent_replay_bytes=replay,
        sources=[f"target: {target.source}", f"draft: {draft.source}"],
    )


def inspect_draft(draft: ModelFacts) -> DraftInspection:
    """What is known of a draft without its target. Raises ConfigError if its config is invalid."""
    known = KnownDraft.of(draft, Serving())
    worker, reason = _worker_of_draft(known)
    description = describe_draft(draft.config, known.config)
    return DraftInspection(worker, reason, known.block_size, description)


def choose_worker(target: ModelFacts, draft: ModelFacts) -> tuple[str, str | None]:
    """`worker` and `worker_reason` of a pair, as in `Inspection`, without the memory arithmetic.

    Raises:
        ConfigError: the pair does not fit, or a field or tensor is invalid.
    """
    geometry = None if target.config is None else TargetGeometry.from_dict(target.config)
    known = _checked(draft, Serving(), geometry)
    return _worker(target, geometry, known)


def _checked(draft: ModelFacts, serving: Serving, geometry: TargetGeometry | None) -> KnownDraft:
    known = KnownDraft.of(draft, serving)
    if geometry is not None:
        known.check_target(geometry)
    known.check_weights()
    return known


def as_table(report: Mapping[str, Any], *, sources: bool = False) -> str:
    """`Inspection.report()` for reading: the verdict, then one aligned line per fact, byte counts
    also in GiB. Facts that are unknown, empty or 0 have no line. Lines have up to 120 columns.

    Args:
        sources: also give the source of the facts.
    """
    facts = [
        (name, _readable(name, value))
        for name, value in report.items()
        if name not in (*_HEAD, "sources") and value not in (None, 0, "", [])
    ]
    width = max(len(name) for name, _ in facts)
    indent = " " * (width + 2)
    weights = weights_verdict(report["worker"], report["draft_tensors"], report["draft_values"])
    warnings = [f"warning: {text}" for text in report["warnings"]]
    head = [report["verdict"], weights, report["assumptions"], *warnings]
    notes = [
        textwrap.fill(f"{'source':<{width}}  {text}", 120, subsequent_indent=indent)
        for text in (report["sources"] if sources else ())
    ]
    lines = [f"{name:<{width}}  {text}" for name, text in facts]
    return "\n".join([*(textwrap.fill(text, 120) for text in head if text), "", *lines, *notes])


def _warnings(
    target: ModelFacts, draft: ModelFacts, known: KnownDraft, resolved: ResolvedOptions
) -> list[str]:
    of_target = other_target(target.name, draft.name)
    found = [] if of_target is None else [of_target]
    if known.config is not None:
        found += resolved.warnings(known.config, _context(target), {})
    return found


def _context(target: ModelFacts) -> int | None:
    """Tokens of a request, at most; None if the target's config does not tell."""
    text, name = Fields.of(target.config or {}, "target"), "max_position_embeddings"
    return text.positive_int(name) if name in text else None


def _worker(
    target: ModelFacts, geometry: TargetGeometry | None, draft: KnownDraft
) -> tuple[str, str | None]:
    """The choice of `serving.pairing` for a server without further flags, from configs only."""
    worker, reason = _worker_of_draft(draft)
    if worker != "sglang-dflash":
        return worker, reason
    if target.config is None or geometry is None:
        return "unknown", "the facts of this target are KV sizes only"
    if Fields.of(target.config, "target").block("quantization_config").get("lm_head"):
        return "builtin", (
            "the target's lm_head: quantized by its quantization_config, a dense 16- or 32-bit "
            "weight is needed"
        )
    return worker, None


def _worker_of_draft(draft: KnownDraft) -> tuple[str, str | None]:
    if draft.unserved is not None:
        return "builtin", draft.unserved
    if draft.unknown is not None:
        return "unknown", draft.unknown
    if draft.config is None:
        return "unknown", "the facts of this pair are KV sizes only"
    return "sglang-dflash", None


def _rollback(geometry: TargetGeometry | None, worker: str) -> str | None:
    if geometry is None or not geometry.recurrent_layers:
        return None
    return "replay" if geometry.recurrent is not None and worker == "sglang-dflash" else "snapshot"


def _state_bytes(geometry: TargetGeometry | None) -> int | None:
    if geometry is None or (geometry.recurrent is None and geometry.recurrent_layers):
        return None
    return 0 if geometry.recurrent is None else sizes.state_bytes(geometry.recurrent)


def _readable(name: str, value: Any) -> str:
    if "gain" in name:
        return f"{value:.2%}"
    if "bytes" in name and value >= GIB // 1024:
        return f"{value:,} ({value / GIB:.3f} GiB)"
    return f"{value:,}" if isinstance(value, int) and not name.endswith("_id") else str(value)
