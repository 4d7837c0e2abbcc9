"""What serving a pair takes: which worker serves it, and what its memory is spent on. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.facts import sizes
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.published import ModelFacts
from sglang_dflash.facts.sizes import KV_DTYPES
from sglang_dflash.facts.target_config import TargetGeometry
from sglang_dflash.inspect.pair import (
    OURS,
    KnownDraft,
    context_of,
    describe_draft,
    describe_target,
    judge,
    other_target,
)

GIB = 2**30


@dataclass(frozen=True)
class Serving:
    """How the pair would be served. A GiB is 2**30 bytes.

    Attributes:
        kv_memory_gib: memory of both KV pools; None for what weights and recurrent states leave of
            `memory_gib * mem_fraction`.
        kv_dtype: None for bfloat16.
        draft_kv_dtype: None for the target's.

    Raises:
        ConfigError: a value is out of range.
    """

    max_running_requests: int = 48
    memory_gib: float = 80.0
    mem_fraction: float = 0.9
    kv_memory_gib: float | None = None
    kv_dtype: str | None = None
    draft_kv_dtype: str | None = None

    def __post_init__(self) -> None:
        gib = "a positive number of GiB is required"
        dtypes = f"choose one of {', '.join(KV_DTYPES)}"
        checks = (
            ("max_running_requests", lambda n: n >= 1, "a positive number is required"),
            ("mem_fraction", lambda x: 0 < x <= 1, "a fraction above 0 and up to 1 is required"),
            ("memory_gib", lambda x: math.isfinite(x) and x > 0, gib),
            ("kv_memory_gib", lambda x: x is None or (math.isfinite(x) and x > 0), gib),
            ("kv_dtype", lambda name: name is None or name in KV_DTYPES, dtypes),
            ("draft_kv_dtype", lambda name: name is None or name in KV_DTYPES, dtypes),
        )
        for name, is_valid, required in checks:
            if not is_valid(getattr(self, name)):
                raise ConfigError(name, getattr(self, name), required)


class KvSplit(NamedTuple):
    """How the KV memory is divided between target and draft.

    Attributes:
        draft_kv_bytes_unbounded: size of a draft KV cache of one entry per target slot.
        target_tokens_unbounded: target tokens beside such a cache.
        target_tokens_without_draft_kv: target tokens beside no draft KV cache.
        target_tokens_gain: `target_tokens / target_tokens_unbounded - 1`.
        target_tokens_gain_ceiling: that gain if the draft KV cache were empty.
        draft_kv_map: "bounded" for a cache of what the running requests can see.
    """

    draft_kv_entries: int
    draft_kv_bytes: int
    draft_kv_bytes_unbounded: int
    target_tokens: int
    target_tokens_unbounded: int
    target_tokens_without_draft_kv: int
    target_tokens_gain: float
    target_tokens_gain_ceiling: float
    draft_kv_map: str


@dataclass(frozen=True)
class Findings:
    """A fact is None if it is unknown. Sizes are in bytes.

    Attributes:
        serving: what the figures are for.
        warnings: the draft is published for another target; a block, a window or a context is
            larger than what the draft was made for.
        worker: what serves the pair without further flags: "sglang-dflash", "builtin" (SGLang's
            own worker; the bounded figures are then those of ours) or "unknown".
        worker_reason: why it is not "sglang-dflash".
        target_layer_ids: the target layers whose outputs the draft reads, counted from 0.
        draft_step_bytes: what our worker reserves beside weights and K/V on one GPU, with Triton's
            draft attention and captured graphs, without the workspace of that attention (some MiB,
            by the GPU); None if another worker serves.
        draft_tensors: how many tensors of the draft's weights were checked against its config; None
            if there are no weights at hand.
        draft_values: "finite" if the values of these tensors were read and are finite; None if only
            headers are at hand.
        recurrent_rollback: how that worker follows an accepted prefix in recurrent layers; None if
            there are none.
        recurrent_state_bytes: of one request.
        recurrent_snapshot_bytes: scratch of one request's verification with rollback by snapshots.
        recurrent_replay_bytes: the same with rollback by replay.
        kv: fields of their own in the report.
    """

    serving: Serving
    warnings: list[str]
    target: str
    draft: str
    worker: str
    worker_reason: str | None
    target_architecture: str | None
    target_layers: str | None
    target_dtype: str | None
    target_context: int | None
    target_hidden_size: int | None
    target_vocab_size: int | None
    draft_architecture: str | None
    draft_layers: str | None
    draft_dtype: str | None
    draft_context: int | None
    target_layer_ids: list[int] | None
    mask_token_id: int | None
    draft_rope: str | None
    block_size: int
    window: int | None
    sinks: int
    max_running_requests: int
    target_kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    kv_memory_bytes: int
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
    kv: KvSplit
    sources: list[str]

    def facts(self) -> dict[str, Any]:
        """Every fact by name, those of `kv` among them, without `serving`."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        del found["serving"]
        kv, sources = found.pop("kv"), found.pop("sources")
        return {**found, **kv._asdict(), "sources": sources}


def inspect(
    target: ModelFacts,
    draft: ModelFacts,
    options: Options,
    serving: Serving,
    names: Mapping[str, str] | None = None,
) -> Findings:
    """Compute what serving this pair would cost.

    Args:
        names: setting -> what the user types for it, for warnings.

    Raises:
        ConfigError: the pair does not fit, an option is out of range, a needed fact is unknown, or
            no memory is left for KV.
    """
    geometry, known, worker, reason = judge(target, draft)
    resolved, context = known.resolve(options), context_of(target)
    requests, block_size = serving.max_running_requests, resolved.block_size
    target_kv, draft_kv = _kv_bytes(target, geometry, known, serving)
    recurrent = _recurrent(geometry, worker, block_size)
    steps = None
    if worker == OURS and known.config is not None:
        steps = _step_bytes(known.config, resolved, requests, context)
    weights = sizes.draft_weight_bytes(known.config) if known.config else draft.weight_bytes
    states = sum(recurrent[f"recurrent_{part}_bytes"] or 0 for part in ("state", "replay"))
    memory = _kv_memory(serving, target.weight_bytes, weights, requests * states, steps or 0)
    kv = split_kv(memory, target_kv, draft_kv, resolved.draft_kv_entries(requests))
    options.check_room(resolved, context=context, kv_tokens=kv.target_tokens)
    return Findings(
        serving=serving,
        warnings=[
            *other_target(target.name, draft.name),
            *(resolved.warnings(known.config, context, names or {}) if known.config else ()),
        ],
        target=target.name,
        draft=draft.name,
        worker=worker,
        worker_reason=reason,
        **describe_target(target, geometry),
        **describe_draft(known),
        block_size=block_size,
        window=resolved.reach.tokens,
        sinks=resolved.reach.sinks,
        max_running_requests=requests,
        target_kv_bytes_per_token=target_kv,
        draft_kv_bytes_per_token=draft_kv,
        kv_memory_bytes=memory,
        target_weight_bytes=target.weight_bytes,
        draft_weight_bytes=weights,
        draft_step_bytes=steps,
        draft_tensors=len(draft.tensors) if known.config and draft.tensors else None,
        draft_values="finite" if known.config and draft.weights else None,
        **recurrent,
        kv=kv,
        sources=[f"target: {target.source}", f"draft: {draft.source}"],
    )


def split_kv(memory: int, target_bytes: int, draft_bytes: int, entries: int | None) -> KvSplit:
    """Divide `memory` bytes between target and draft KV.

    A bounded cache that would outgrow one entry per target slot becomes that. Its tags (4 bytes per
    target token, 5 per entry) are left out.

    Args:
        target_bytes, draft_bytes: KV bytes of one token.
        entries: of a bounded draft KV cache; None for one per target slot.

    Raises:
        ConfigError: the memory does not hold one token.
    """
    unbounded = memory // (target_bytes + draft_bytes)
    if not unbounded:
        raise ConfigError(
            "kv_memory_gib",
            memory / GIB,
            f"this does not hold one token of {target_bytes + draft_bytes} bytes; give more",
        )
    bounded = entries is not None and entries < unbounded
    if entries is not None and bounded:
        tokens = (memory - entries * draft_bytes) // target_bytes
    else:
        entries = tokens = unbounded
    return KvSplit(
        draft_kv_entries=entries,
        draft_kv_bytes=entries * draft_bytes,
        draft_kv_bytes_unbounded=unbounded * draft_bytes,
        target_tokens=tokens,
        target_tokens_unbounded=unbounded,
        target_tokens_without_draft_kv=memory // target_bytes,
        target_tokens_gain=tokens / unbounded - 1,
        target_tokens_gain_ceiling=draft_bytes / target_bytes,
        draft_kv_map="bounded" if bounded else "one entry per target slot",
    )


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
    config: DraftConfig, options: ResolvedOptions, requests: int, context: int | None
) -> int:
    reach = options.reach
    return sizes.draft_memory(
        config,
        block_size=options.block_size,
        requests=requests,
        columns=reach.of(context or (reach.tokens or 0) + reach.sinks),
        entries=options.draft_kv_entries(requests),
        recorded=requests,
    ).total


def _kv_bytes(
    target: ModelFacts, geometry: TargetGeometry | None, known: KnownDraft, serving: Serving
) -> tuple[int, int]:
    """KV bytes of one token, of the target and of the draft."""
    itemsize = KV_DTYPES[serving.kv_dtype or "bfloat16"]
    of_target = sizes.target_kv_bytes(geometry, itemsize) if geometry else None
    of_draft = known.kv_bytes(KV_DTYPES.get(serving.draft_kv_dtype or "", itemsize))
    if of_target is None:
        of_target = _stated_kv_bytes(target, "kv_dtype", serving.kv_dtype)
    if of_draft is None:
        of_draft = _stated_kv_bytes(known.facts, "draft_kv_dtype", serving.draft_kv_dtype)
    return of_target, of_draft


def _recurrent(geometry: TargetGeometry | None, worker: str, block_size: int) -> dict[str, Any]:
    """The facts of recurrent layers in `Findings`."""
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
