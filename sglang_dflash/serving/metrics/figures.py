"""All that a server shows of our worker: one table for /server_info and /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.common.machine import hardware, version
from sglang_dflash.drafting.draft_counters import DraftCounts
from sglang_dflash.drafting.drafter import Proposer
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.lookup import Lookup
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Finding, ResolvedOptions
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.memory.sizes import HeadBytes, head_bytes
from sglang_dflash.serving.kv_transfer.disaggregation import DraftKVPages
from sglang_dflash.serving.kv_transfer.host_tier import HostTier
from sglang_dflash.serving.metrics import server_info
from sglang_dflash.serving.metrics.counts import AcceptanceCounts, DraftWatch, RequestStep
from sglang_dflash.serving.metrics.series import Figure, Series, show_info
from sglang_dflash.serving.metrics.step_times import StepTimes

# Meanings of several rows.
_BLOCKS = "tokens per block, served and trained"
_REACH = "committed tokens that the draft reads: the last ones, and the first of a request"
_CONTEXTS = (
    "context length as configured (the log says at start if the KV pool holds less), and that the "
    "draft was made for"
)
_OPERATIONS = "the draft attention backend, and the class with the drafter's other operations"
_HEAD = "bytes of DFlash2's parts that a proposal reads on a rank, once and for each request"
_ROLLBACK = (
    "how recurrent layers follow an accepted prefix, and the memory that verification needs for it"
)
_SOURCES = (
    "steps of a request, and accepted drafts, by where the drafts came from, `draft` or `lookup` "
    "([lookup](lookup.md#what-it-shows))"
)
_TIMES = "[where time goes](#where-time-goes), on average since the start"

# Known when the server starts.
SET_UP: tuple[Figure[Figures], ...] = (
    Figure("worker", lambda s: s.worker,
           "the worker's class. With SGLang's worker there is no key `dflash`: "
           "`dflash_builtin_reason` in the same entry tells why it serves"),
    Figure("version", lambda s: version("sglang-dflash"), "the version of sglang-dflash"),
    Figure("tensor_parallel", lambda s: s.model.tp.size,
           "ranks over which drafter and target are sharded; bytes below are one rank's"),
    Figure("block_size", lambda s: s.options.verify_block, _BLOCKS),
    Figure("trained_block_size", lambda s: s.model.config.block_size, _BLOCKS),
    Figure("window", lambda s: s.options.reach.tokens, _REACH),
    Figure("sinks", lambda s: s.options.reach.sinks, _REACH),
    Figure("context_length", lambda s: s.context_length, _CONTEXTS),
    Figure("draft_max_position_embeddings", lambda s: s.model.config.max_position_embeddings,
           _CONTEXTS),
    Figure("draft_kind", lambda s: s.model.config.head.description,
           "DFlash, or DFlash2 with its selector and convolution"),
    Figure("draft_attention", lambda s: s.attention, _OPERATIONS),
    Figure("draft_ops", lambda s: type(s.model.ops).__name__, _OPERATIONS),
    Figure("draft_kv_groups", lambda s: [shown_group(group) for group in s.drafter.groups],
           "the draft KV caches, one for each group of layers with the same reach; without "
           "`is_ring` a cache has an entry per target slot"),
    Figure("draft_kv_entries", lambda s: s.draft_kv_entries,
           "entries of the smallest draft KV cache"),
    Figure("draft_kv_bytes", lambda s: sum(cache.kv.nbytes for cache in s.caches),
           "of all draft KV caches"),
    Figure("draft_kv_dtype", lambda s: str(s.caches[0].kv.dtype).removeprefix("torch."),
           "of draft K/V"),
    Figure("draft_memory_bytes", lambda s: s.memory,
           "what the drafter takes at most beside weights and draft K/V ([memory](gpu.md#memory))"),
    Figure("draft_head_bytes", lambda s: s.head_bytes.once, _HEAD),
    Figure("draft_head_bytes_per_request", lambda s: s.head_bytes.per_request, _HEAD),
    Figure("recurrent_rollback", lambda s: s.rollback and s.rollback.name, _ROLLBACK),
    Figure("recurrent_scratch_bytes", lambda s: s.rollback and s.rollback.scratch_bytes, _ROLLBACK),
    Figure("lookup_bytes", lambda s: s.lookup and s.lookup.texts.nbytes,
           "the table of the requests' texts, with [lookup](lookup.md#what-it-shows)"),
    Figure("simulated_acceptance", lambda s: s.simulated,
           "tokens per step that `SGLANG_SIMULATE_ACC_LEN` sets; outputs then have no meaning"),
)  # fmt: skip
# What steps change, and what the log has on lines of its own.
COUNTS: tuple[Figure[Figures], ...] = (
    Figure("acceptance_length", lambda s: s.counts.acceptance_length,
           "tokens kept per verify step; roughly an upper bound of the speedup"),
    Figure("acceptance_by_position", lambda s: s.counts.by_position(),
           "share of the steps with that draft in which the first, second, ... was accepted and "
           "kept"),
    Figure("verify_steps", lambda s: s.counts.drafted.steps,
           "verify steps, one per live request and forward", "verify_steps"),
    Figure("committed_tokens", lambda s: s.counts.drafted.tokens,
           "tokens kept from verify steps, bonus tokens included; divided by `verify_steps`, the "
           "acceptance length", "committed_tokens"),
    Figure("accepted_drafts", lambda s: s.counts.accepted,
           "verify steps that accepted, and kept, the first, second, ... draft",
           "accepted_drafts", label="position"),
    Figure("undrafted_steps", lambda s: s.counts.undrafted.steps,
           "steps of live requests without drafts (custom logit processors, grammars that cannot "
           "look ahead, steps of width 1)", "undrafted_steps"),
    Figure("undrafted_tokens", lambda s: s.counts.undrafted.tokens,
           "tokens kept from steps without drafts", "undrafted_tokens"),
    Figure("width_steps", lambda s: {str(w): steps for w, steps in s.width_steps.items()},
           "decode steps of a batch, by [verify width](width.md#what-it-shows)",
           "steps", label="width"),
    Figure("steps_by_source", lambda s: s.lookup and s.draft_counts.steps_by_source, _SOURCES),
    Figure("accepted_drafts_by_source",
           lambda s: s.lookup and s.draft_counts.accepted_by_source, _SOURCES),
    Figure("acceptance_alarm", lambda s: s.watch.alarm.raised,
           "whether the acceptance length stays near 1 ([alarm](doctor.md#alarm))",
           "acceptance_alarm", goes_down=True),
    Figure("recent_acceptance_length", lambda s: s.watch.recent_acceptance_length,
           "acceptance length of the last 512 verify steps that were judged"),
    Figure("warnings", lambda s: [warning._asdict() for warning in s.warnings],
           "what the server warned of when it started: name, problem, advice"),
    Figure("nonfinite_outputs", lambda s: s.draft_counts.nonfinite,
           "drafted tokens with NaN or Inf in their logits, which are not accepted, and committed "
           "ones with such features, whose K/V is then zeros", "nonfinite_outputs"),
    Figure("decode_steps", lambda s: sum(s.width_steps.values()), "forwards of a batch"),
    Figure("step_milliseconds", lambda s: s.times.step_milliseconds, _TIMES),
    Figure("step_shares", lambda s: s.times.shares(), _TIMES),
    Figure("host_seconds", lambda s: {k: round(v, 6) for k, v in s.times.seconds.items()},
           "host time by phase of a step; on an accelerator, the time to launch the work",
           "host_seconds", label="phase"),
    Figure("draft_kv_live_share", lambda s: round(min(c.live_share() for c in s.caches), 4),
           "share of live entries, in the cache where it is smallest"),
    Figure("draft_context_share", lambda s: s.context_share,
           "share of the context that drafts were to see and found in rings; null without one. If "
           "it is low, the cache is too small"),
    Figure("", lambda s: s.draft_counts.context_sought,
           "context tokens that drafts were to see in rings, per step, request and ring",
           "draft_context_sought"),
    Figure("", lambda s: s.draft_counts.context_found,
           "those of `draft_context_sought` whose draft K/V was live", "draft_context_found"),
    Figure("draft_kv_received_bytes", lambda s: s.pages.received_bytes,
           "of a decode server: draft K/V of prompts that it has asked "
           "[prefill servers](scaling.md#prefilldecode-disaggregation) for",
           "draft_kv_received_bytes"),
    Figure("loaded_back_tokens", lambda s: s.host_tier.loaded if s.host_tier else 0,
           "with a [hierarchical cache](scaling.md#hierarchical-cache): tokens whose K/V came back "
           "from host memory", "loaded_back_tokens"),
    Figure("loaded_back_draft_kv", lambda s: s.host_tier.loaded_draft if s.host_tier else 0,
           "those of `loaded_back_tokens` whose draft K/V came back, too. If all draft layers "
           "slide or have a window, only what they can see does", "loaded_back_draft_kv"),
)  # fmt: skip


def shown_group(group: KVGroup) -> dict[str, Any]:
    """A draft KV cache, and the layers that it is of."""
    return {
        "layers": list(group.layer_group.numbers),
        "window": group.reach.tokens,
        "sinks": group.reach.sinks,
        "entries": group.cache.num_entries,
        "is_ring": isinstance(group.cache, RingKVCache),
    }


@dataclass(eq=False, kw_only=True)
class Figures:
    """The figures of one server, and where they come from.

    Attributes:
        worker: the name of its class.
        attention: the draft attention backend.
        memory: bytes reserved for the drafter, by use.
        context_length: tokens of a request, at most.
        simulated: the acceptance length that SGLang's variables ask for; None for none.
        lookup: of drafts in the requests' texts; None without.
        host_tier: of draft K/V in host memory; None without a hierarchical cache.
        pages: of draft K/V, as other servers send them.
        rollback: of recurrent layers; None without them.
        times: of decode steps.
        labels: of this process's series in /metrics; None for none.
        warnings: what was warned of at start-up.
    """

    worker: str
    attention: str
    memory: Mapping[str, int]
    context_length: int
    simulated: float | None
    model: DraftModel
    options: ResolvedOptions
    drafter: Proposer
    lookup: Lookup | None
    host_tier: HostTier | None = None
    pages: DraftKVPages
    rollback: Any
    policy: WidthPolicy
    width_steps: Mapping[int, int]
    labels: Mapping[str, Any] | None = None
    warnings: Sequence[Finding] = ()
    counts: AcceptanceCounts = field(init=False)
    watch: DraftWatch = field(init=False)
    times: StepTimes = field(init=False)

    def __post_init__(self) -> None:
        self.counts = AcceptanceCounts(self.options.verify_block)
        self.times = StepTimes()
        # Of the ranks of one server, the first one logs.
        counters, speaks = self.drafter.counters, self.model.tp.rank == 0
        self.watch = DraftWatch(
            counters, self.draft_kv_entries, self.warnings, speaks, self.not_paying
        )
        self._series = None if self.labels is None else Series(COUNTS, self, self.labels)
        show_info(self.labels, server_info.labels(self.describe()))

    @property
    def caches(self) -> list[DraftKVCache]:
        return [group.cache for group in self.drafter.groups]

    @property
    def draft_kv_entries(self) -> int:
        """Entries of the smallest draft KV cache."""
        return min(cache.num_entries for cache in self.caches)

    @property
    def draft_counts(self) -> DraftCounts:
        """Counts of drafting on the device, up to the last step or shortly before."""
        return self.drafter.counters.read()

    @property
    def context_share(self) -> float | None:
        """Share of the context to be seen by drafts whose K/V was in the cache; None if the context
        is not bounded."""
        share = self.draft_counts.context_share
        return None if share is None else round(share, 4)

    @property
    def head_bytes(self) -> HeadBytes:
        itemsize = self.model.dtype.itemsize
        return head_bytes(self.model.config, self.options.draft_block, itemsize)

    def not_paying(self) -> str | None:
        """In words, as `doctor` has it, that drafts do not pay; None if they do, if that is not
        known, or if the alarm has told. Reads nothing from the device."""
        if self.watch.alarm.raised:
            return None
        counts = {row.key: row.source(self) for row in COUNTS if row.key in server_info.JUDGED_BY}
        device = self.caches[0].kv.device.type
        state = {
            "dflash": counts | dict(self.policy.report()),
            "machine": {"accelerator": None if device == "cpu" else device},
        }
        judged = server_info.ServerInfo({"internal_states": [state]})
        return judged.plainly or judged.losing

    def add(self, steps: Sequence[RequestStep]) -> None:
        """Take in what live requests got from one decode step."""
        self.counts.add(steps)
        self.watch.add(steps)
        if self._series is not None:
            self._series.update()

    def describe(self) -> dict[str, Any]:
        """The set-up, for the log."""
        rows = {row.key: row.source(self) for row in SET_UP}
        return {**rows, **self.drafter.describe()}

    def report(self) -> dict[str, Any]:
        """The set-up and all counts since the start, for /server_info."""
        counts = {row.key: row.source(self) for row in COUNTS if row.key}
        policy, drafter = self.policy.report(), self.drafter.report()
        return {**self.describe(), **counts, **policy, **drafter}


def add_report(_result: None, controller: Any, state: dict[str, Any]) -> None:
    """Add our figures and the machine to the state that /server_info shows, after SGLang has added
    its speculative figures."""
    scheduler = controller.scheduler
    worker, dtype = scheduler.draft_worker, scheduler.tp_worker.model_runner.dtype
    state["machine"] = {**hardware(), "dtype": str(dtype).removeprefix("torch.")}
    report = getattr(worker, "report", None)
    if report is not None:
        state["dflash"] = report()
    reason = getattr(worker, "builtin_reason", None)
    if reason is not None:
        state["dflash_builtin_reason"] = reason
