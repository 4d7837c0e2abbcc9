"""Memory arithmetic of a pair: bytes of weights and KV, and how many tokens fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_dflash.drafting.options import ResolvedOptions
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.errors import ConfigError
from sglang_dflash.facts.published import ModelFacts
from sglang_dflash.facts.sizes import KV_DTYPES, draft_memory

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
        if self.max_running_requests < 1:
            raise ConfigError(
                f"--max-running-requests: {self.max_running_requests}; "
                "a positive number of requests is required"
            )
        if not 0 < self.mem_fraction <= 1:
            raise ConfigError(
                f"--mem-fraction: {self.mem_fraction}; a fraction above 0 and up to 1 is required"
            )
        for flag, gib in (
            ("--memory-gib", self.memory_gib),
            ("--kv-memory-gib", self.kv_memory_gib),
        ):
            if gib is not None and not (math.isfinite(gib) and gib > 0):
                raise ConfigError(f"{flag}: {gib}; a positive number of GiB is required")
        for flag, dtype in (
            ("--kv-dtype", self.kv_dtype),
            ("--draft-kv-dtype", self.draft_kv_dtype),
        ):
            if dtype is not None and dtype not in KV_DTYPES:
                raise ConfigError(f"{flag}: {dtype!r}; there is {', '.join(KV_DTYPES)}")

    @property
    def kv_dtype_bytes(self) -> int:
        """Bytes of one element of the target's KV."""
        return KV_DTYPES[self.kv_dtype or "bfloat16"]

    @property
    def draft_kv_dtype_bytes(self) -> int:
        """Bytes of one element of the draft's KV."""
        return KV_DTYPES[self.draft_kv_dtype or self.kv_dtype or "bfloat16"]


@dataclass(frozen=True)
class KvSplit:
    """How the KV memory is divided between target and draft.

    Attributes:
        bounded: whether the draft KV cache is bounded; if not, it has one entry per target slot.
        draft_kv_bytes_unbounded: size of a draft KV cache of one entry per target slot.
        target_tokens_unbounded: target tokens beside such a cache.
        target_tokens_without_draft_kv: target tokens beside no draft KV cache.
        target_tokens_gain: `target_tokens / target_tokens_unbounded - 1`.
        target_tokens_gain_ceiling: that gain if the draft KV cache were empty.
    """

    bounded: bool
    draft_kv_entries: int
    draft_kv_bytes: int
    draft_kv_bytes_unbounded: int
    target_tokens: int
    target_tokens_unbounded: int
    target_tokens_without_draft_kv: int
    target_tokens_gain: float
    target_tokens_gain_ceiling: float


def split_kv(memory: int, target_bytes: int, draft_bytes: int, entries: int | None) -> KvSplit:
    """Divide `memory` bytes between target and draft KV.

    A bounded cache that would outgrow one entry per target slot becomes that.
    Its bookkeeping (4 bytes per target token, 5 per entry) is left out.

    Args:
        target_bytes: target KV bytes of one token.
        draft_bytes: draft KV bytes of one token.
        entries: of a bounded draft KV cache; None for one per target slot.

    Raises:
        ConfigError: the memory does not hold one token.
    """
    unbounded = memory // (target_bytes + draft_bytes)
    if not unbounded:
        raise ConfigError(
            f"--kv-memory-gib: {memory / GIB:.6g} GiB of KV memory do not hold one token of "
            f"{target_bytes + draft_bytes} bytes"
        )
    bounded = entries is not None and entries < unbounded
    if entries is not None and bounded:
        tokens = (memory - entries * draft_bytes) // target_bytes
    else:
        entries = tokens = unbounded
    return KvSplit(
        bounded=bounded,
        draft_kv_entries=entries,
        draft_kv_bytes=entries * draft_bytes,
        draft_kv_bytes_unbounded=unbounded * draft_bytes,
        target_tokens=tokens,
        target_tokens_unbounded=unbounded,
        target_tokens_without_draft_kv=memory // target_bytes,
        target_tokens_gain=tokens / unbounded - 1,
        target_tokens_gain_ceiling=draft_bytes / target_bytes,
    )


def drafter_bytes(
    config: DraftConfig, options: ResolvedOptions, serving: Serving, context: int
) -> int:
    """What our worker reserves beside weights and K/V on one GPU, 16-bit weights, with Triton's
    draft attention and captured graphs, without the workspace of that attention (some MiB, by the
    GPU).

    Args:
        context: tokens of a request, at most; 0 if unknown.
    """
    reach, requests = options.reach, serving.max_running_requests
    columns = reach.of(context or (reach.tokens or 0) + reach.sinks)
    return draft_memory(
        config,
        block_size=options.block_size,
        requests=requests,
        columns=columns,
        entries=options.draft_kv_entries(requests),
        recorded=requests,
    ).total


def kv_memory_bytes(
    serving: Serving,
    weights: Mapping[str, int | None],
    state_bytes_per_request: int,
    drafter: int = 0,
) -> int:
    """Bytes for both KV pools.

    Args:
        weights: bytes of the "target" and "draft" weights; None if unknown.
        state_bytes_per_request: the target's recurrent state and the scratch of its verification.
        drafter: see `drafter_bytes`.

    Raises:
        ConfigError: a size of weights is needed and unknown, or nothing is left for KV.
    """
    if serving.kv_memory_gib is not None:
        return int(serving.kv_memory_gib * GIB)
    total = 0
    for name, size in weights.items():
        if size is None:
            raise ConfigError(
                f"--kv-memory-gib: required, because the size of the {name}'s weights is not known"
            )
        total += size
    states = serving.max_running_requests * state_bytes_per_request
    left = int(serving.memory_gib * serving.mem_fraction * GIB) - total - states - drafter
    if left <= 0:
        raise ConfigError(
            f"--memory-gib {serving.memory_gib:g} x --mem-fraction {serving.mem_fraction:g}: "
            "the weights alone do not fit, or leave nothing for KV "
            f"({total / GIB:.2f} GiB of weights, {states / GIB:.2f} GiB of recurrent state, "
            f"{drafter / GIB:.2f} GiB of draft steps)"
        )
    return left


def stated_kv_bytes(facts: ModelFacts, flag: str, dtype: str | None) -> int:
    """KV bytes of one token of a model without a config.

    Raises:
        ConfigError: they are unknown, or `dtype`, the value of `flag`, asks for another size.
    """
    if facts.kv_bytes_per_token is None:
        raise ConfigError(f"{facts.name}: neither a config nor kv_bytes_per_token is known")
    if dtype is not None:
        raise ConfigError(
            f"{flag}: {dtype!r}, but of {facts.name} only the KV bytes as measured are known; "
            "leave the flag out"
        )
    return facts.kv_bytes_per_token
