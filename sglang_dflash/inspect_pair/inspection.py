"""What a pair will cost, before anything is loaded: weights, KV bytes per token, and the target tokens that fit.

Letters: M bytes for all KV, t and d bytes of target and draft KV per token, D bytes of the draft's KV, R running requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.errors import ConfigError, UnsupportedDraft
from sglang_dflash.checkpoint.published import ModelFacts
from sglang_dflash.checkpoint.target_config import TargetGeometry, positive
from sglang_dflash.core.options import Options
from sglang_dflash.inspect_pair.description import (
    DraftDescription,
    TargetDescription,
    describe_draft,
    describe_target,
)

GIB = 2**30
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
_WEIGHT_BYTES = 2


@dataclass(frozen=True)
class Serving:
    """How the pair would be served; GiB are 2**30 bytes.

    `kv_memory_gib`: memory of both KV pools (None: what the weights and R requests' recurrent states leave of `memory_gib * mem_fraction`).
    `kv_dtype`, `draft_kv_dtype`: None for bfloat16 and for the target's.
    """

    max_running_requests: int = 48
    memory_gib: float = 80.0
    mem_fraction: float = 0.9
    kv_memory_gib: float | None = None
    kv_dtype: str | None = None
    draft_kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.max_running_requests < 1:
            raise ConfigError(
                f"--max-running-requests: {self.max_running_requests}; a positive number of requests is required"
            )
        if not 0 < self.mem_fraction <= 1:
            raise ConfigError(
                f"--mem-fraction: {self.mem_fraction}; a share above 0 and up to 1 is required"
            )
        for flag, value in (
            ("--memory-gib", self.memory_gib),
            ("--kv-memory-gib", self.kv_memory_gib),
        ):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{flag}: {value}; a positive number of GiB is required")
        for flag, dtype in (
            ("--kv-dtype", self.kv_dtype),
            ("--draft-kv-dtype", self.draft_kv_dtype),
        ):
            if dtype is not None and dtype not in DTYPE_BYTES:
                raise ConfigError(f"{flag}: {dtype!r}; there is {', '.join(DTYPE_BYTES)}")


@dataclass(frozen=True)
class Draft:
    """A draft as far as it is known.

    `config`: None where our worker does not take it (`unserved` says why), or not enough is known (`unknown` says of what).
    """

    config: DraftConfig | None
    unserved: str | None
    unknown: str | None
    kv_bytes_per_token: int
    weight_bytes: int | None
    block_size: int | None


@dataclass(frozen=True)
class KvSplit:
    """How M is divided between target and draft. `draft_kv_slots` has one slot per target token where `bounded` is False."""

    bounded: bool
    draft_kv_slots: int
    draft_kv_bytes: int
    draft_kv_bytes_unbounded: int
    target_tokens: int
    target_tokens_unbounded: int
    target_tokens_without_draft_kv: int
    target_tokens_gain: float
    target_tokens_gain_ceiling: float


@dataclass(frozen=True)
class Inspection:
    """The answer; every size in bytes. None where it is not known.

    `worker`: which one a server with these flags takes: "sglang-dflash", "builtin" (SGLang's own, for `worker_reason`; the bounded
    figures are then those of ours) or "unknown".
    `recurrent_rollback`: how ours follows an accepted prefix in recurrent layers where no flag says otherwise (None: there are none).
    `recurrent_state_bytes`: of one request; `recurrent_snapshot_bytes` and `recurrent_replay_bytes`: what its verification keeps
    beside that, by either rollback.
    """

    target: str
    draft: str
    worker: str
    worker_reason: str | None
    target_says: TargetDescription
    draft_says: DraftDescription
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
    recurrent_layers: int | None
    recurrent_rollback: str | None
    recurrent_state_bytes: int | None
    recurrent_snapshot_bytes: int | None
    recurrent_replay_bytes: int | None
    sources: list[str]

    def report(self) -> dict[str, Any]:
        """All of it, flat."""
        facts = asdict(self)
        head = {name: facts.pop(name) for name in ("target", "draft", "worker", "worker_reason")}
        said = {**facts.pop("target_says"), **facts.pop("draft_says")}
        split, sources = facts.pop("kv"), facts.pop("sources")
        split["draft_kv_map"] = "bounded" if split.pop("bounded") else "one slot per target token"
        return {**head, **said, **facts, **split, "sources": sources}


@dataclass(frozen=True)
class DraftInspection:
    """`worker` and `reason`: as in `Inspection`, as far as the draft decides them."""

    worker: str
    reason: str | None
    block_size: int | None
    says: DraftDescription


def inspect(
    target: ModelFacts, draft: ModelFacts, options: Options, serving: Serving
) -> Inspection:
    """Say what serving this pair would cost.

    Raises:
        ConfigError: the pair does not fit, an option is out of range, something needed is not known, or no memory is left for KV.
    """
    geometry = None if target.config is None else TargetGeometry.from_dict(target.config)
    t = _target_kv_bytes(target, geometry, serving)
    drafted = _read_draft(draft, serving)
    if geometry is not None:
        _check_target(draft, drafted, geometry)
    options = _resolve(options, drafted)
    assert options.block_size is not None
    recurrent = geometry.recurrent if geometry else None
    memory = _kv_memory_bytes(target, drafted, geometry, options.block_size, serving)
    slots = None if options.window is None else options.draft_kv_slots(serving.max_running_requests)
    worker, reason = _worker(target, geometry, drafted)
    return Inspection(
        target=target.name, draft=draft.name, worker=worker, worker_reason=reason,
        target_says=describe_target(target.config, geometry), draft_says=describe_draft(draft.config, drafted.config),
        block_size=options.block_size, window=options.window, sinks=options.sinks, max_running_requests=serving.max_running_requests,
        target_kv_bytes_per_token=t, draft_kv_bytes_per_token=drafted.kv_bytes_per_token,
        kv_memory_bytes=memory, kv=split_kv(memory, t, drafted.kv_bytes_per_token, slots),
        target_weight_bytes=target.weight_bytes, draft_weight_bytes=drafted.weight_bytes,
        recurrent_layers=geometry.recurrent_layers if geometry else None,
        recurrent_rollback=_rollback(geometry, worker),
        recurrent_state_bytes=geometry.recurrent_state_bytes if geometry else None,
        recurrent_snapshot_bytes=recurrent.snapshot_bytes(options.block_size) if recurrent else None,
        recurrent_replay_bytes=recurrent.replay_bytes(options.block_size) if recurrent else None,
        sources=[f"target: {target.source}", f"draft: {draft.source}"],
    )  # fmt: skip


def split_kv(memory: int, t: int, d: int, slots: int | None) -> KvSplit:
    """Divide `memory` bytes; `slots`: entries of a bounded draft cache, or None for one per target token.

    The bounded cache's own bookkeeping (4 bytes per target token, 5 per entry) is left out.
    A cache that would outgrow one slot per target token is not bounded by anything: it becomes one slot per target token.
    """
    together = memory // (t + d)
    bounded = slots is not None and slots < together
    entries = slots if slots is not None and bounded else together
    tokens = (memory - entries * d) // t if bounded else together
    if not together:
        raise ConfigError(
            f"--kv-memory-gib: {memory / GIB:.6g} GiB of KV memory do not hold one token of {t + d} bytes"
        )
    return KvSplit(
        bounded=bounded,
        draft_kv_slots=entries,
        draft_kv_bytes=entries * d,
        draft_kv_bytes_unbounded=together * d,
        target_tokens=tokens,
        target_tokens_unbounded=together,
        target_tokens_without_draft_kv=memory // t,
        target_tokens_gain=tokens / together - 1,
        target_tokens_gain_ceiling=d / t,
    )


def draft_weight_bytes(config: DraftConfig) -> int:
    """Bytes of a DFlash v1 draft in bfloat16: projection of the features, layers and norms; embedding and lm_head are the target's."""
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    attention = (
        2 * width * q + 2 * width * kv + (q + 2 * kv + width if config.attention_bias else 0)
    )
    layer = attention + 3 * width * inner + 2 * width + 2 * dim
    return _WEIGHT_BYTES * (
        config.num_features * width + 2 * width + config.num_hidden_layers * layer
    )


def inspect_draft(draft: ModelFacts) -> DraftInspection:
    """What is known of a draft without its target. Raises ConfigError where its config is invalid."""
    drafted = _read_draft(draft, Serving())
    worker, reason = _worker_of(drafted)
    return DraftInspection(
        worker, reason, drafted.block_size, describe_draft(draft.config, drafted.config)
    )


def _worker_of(draft: Draft) -> tuple[str, str | None]:
    if draft.unserved is not None:
        return "builtin", draft.unserved
    if draft.unknown is not None:
        return "unknown", draft.unknown
    return (
        ("unknown", "the facts of this pair are KV sizes only")
        if draft.config is None
        else ("sglang-dflash", None)
    )


def _worker(
    target: ModelFacts, geometry: TargetGeometry | None, draft: Draft
) -> tuple[str, str | None]:
    """The answer of `serving.select` for a server without further flags, from the configs alone."""
    worker, reason = _worker_of(draft)
    if worker != "sglang-dflash":
        return worker, reason
    if geometry is None:
        return "unknown", "the facts of this target are KV sizes only"
    if ((target.config or {}).get("quantization_config") or {}).get("lm_head"):
        return (
            "builtin",
            "the target's lm_head: quantized by its quantization_config, a dense 16- or 32-bit weight is needed",
        )
    return worker, None


def _rollback(geometry: TargetGeometry | None, worker: str) -> str | None:
    if geometry is None or not geometry.recurrent_layers:
        return None
    return "replay" if geometry.recurrent is not None and worker == "sglang-dflash" else "snapshot"


def _check_target(draft: ModelFacts, drafted: Draft, geometry: TargetGeometry) -> None:
    config = drafted.config
    if drafted.unknown is not None and draft.config is not None:
        # Its mask token may not be known, and plays no part in this.
        own = {"mask_token_id": 0, **(draft.config.get("dflash_config") or {})}
        config = DraftConfig.from_dict({**draft.config, "dflash_config": own})
    if config is not None:
        config.check_target(
            hidden_size=geometry.hidden_size,
            vocab_size=geometry.vocab_size,
            num_layers=geometry.num_hidden_layers,
        )


def _target_kv_bytes(target: ModelFacts, geometry: TargetGeometry | None, serving: Serving) -> int:
    if geometry is not None:
        return geometry.kv_bytes_per_token(DTYPE_BYTES[serving.kv_dtype or "bfloat16"])
    return _stated_kv_bytes("--kv-dtype", serving.kv_dtype, target)


def _read_draft(draft: ModelFacts, serving: Serving) -> Draft:
    dtype_bytes = DTYPE_BYTES[serving.draft_kv_dtype or serving.kv_dtype or "bfloat16"]
    if draft.config is None:
        stated = _stated_kv_bytes("--draft-kv-dtype", serving.draft_kv_dtype, draft)
        return Draft(None, None, None, stated, draft.weight_bytes, None)
    if draft.unknown:
        unknown = f"not seen of the draft's config.json: {', '.join(draft.unknown)}"
        return _draft_without_config(draft, draft.config, None, unknown, dtype_bytes)
    try:
        config = DraftConfig.from_dict(draft.config)
    except UnsupportedDraft as reason:
        return _draft_without_config(draft, draft.config, str(reason), None, dtype_bytes)
    return Draft(
        config,
        None,
        None,
        math.prod(config.kv_shape) * dtype_bytes,
        draft_weight_bytes(config),
        config.block_size,
    )


def _draft_without_config(
    draft: ModelFacts,
    raw: Mapping[str, Any],
    unserved: str | None,
    unknown: str | None,
    dtype_bytes: int,
) -> Draft:
    """What can be said of a draft with another head, or one not seen in full: its layers' K/V are of the usual shape."""
    text = {**raw, **(raw.get("text_config") or {})}
    heads = positive(text, "num_attention_heads")
    head_dim = positive(text, "head_dim", default=positive(text, "hidden_size") // heads)
    kv = (
        positive(text, "num_hidden_layers")
        * 2
        * positive(text, "num_key_value_heads", default=heads)
        * head_dim
        * dtype_bytes
    )
    block_size = {**text, **(raw.get("dflash_config") or {})}.get("block_size")
    return Draft(None, unserved, unknown, kv, draft.weight_bytes, block_size)


def _resolve(options: Options, draft: Draft) -> Options:
    if draft.config is not None:
        return options.resolve(draft.config)
    block_size = options.block_size or draft.block_size
    if block_size is None:
        raise ConfigError(
            "--block-size: required, because what is known of this draft does not say it"
        )
    return replace(
        options, block_size=block_size, sinks=options.sinks if options.window is not None else 0
    )


def _stated_kv_bytes(flag: str, dtype: str | None, facts: ModelFacts) -> int:
    if facts.kv_bytes_per_token is None:
        raise ConfigError(f"{facts.name}: neither a config nor kv_bytes_per_token is known of it")
    if dtype is not None:
        raise ConfigError(
            f"{flag}: {dtype!r}, but of {facts.name} only the KV bytes as measured are known; leave the flag out"
        )
    return facts.kv_bytes_per_token


def _kv_memory_bytes(
    target: ModelFacts,
    draft: Draft,
    geometry: TargetGeometry | None,
    block_size: int,
    serving: Serving,
) -> int:
    if serving.kv_memory_gib is not None:
        return int(serving.kv_memory_gib * GIB)
    for name, weights in (("target", target.weight_bytes), ("draft", draft.weight_bytes)):
        if weights is None:
            raise ConfigError(
                f"--kv-memory-gib: required, because the size of the {name}'s weights is not known"
            )
    weights = (target.weight_bytes or 0) + (draft.weight_bytes or 0)
    shape = geometry.recurrent if geometry else None
    states = (
        serving.max_running_requests * (shape.state_bytes + shape.replay_bytes(block_size))
        if shape
        else 0
    )
    left = int(serving.memory_gib * serving.mem_fraction * GIB) - weights - states
    if left <= 0:
        raise ConfigError(
            f"--memory-gib {serving.memory_gib:g} x --mem-fraction {serving.mem_fraction:g}: the weights alone do not fit, "
            f"or leave nothing for KV ({weights / GIB:.2f} GiB of weights, {states / GIB:.2f} GiB of recurrent state)"
        )
    return left
