"""All that a server shows of our worker: one table for /server_info and /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_dflash.drafting.draft_counters import DraftCounts
from sglang_dflash.drafting.drafter import Proposer
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.machine import hardware, version
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.options import Finding, ResolvedOptions
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.texts import Lookup
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.memory.sizes import HeadBytes, head_bytes
from sglang_dflash.serving.kv_transfer.disaggregation import DraftKVPages
from sglang_dflash.serving.kv_transfer.host_tier import HostTier
from sglang_dflash.serving.metrics import server
from sglang_dflash.serving.metrics.counts import AcceptanceCounts, DraftWatch, RequestStep
from sglang_dflash.serving.metrics.step_times import StepTimes

INFO_HELP = (
    "Always 1. Which DFLASH worker serves (sglang-dflash or builtin, SGLang's own), its block size "
    "and draft window, and the version of sglang-dflash."
)


class Figure(NamedTuple):
    """A row.

    Attributes:
        key: in /server_info; "" if it is in /metrics only.
        source: the value: a number, numbers by position from 1 on, or numbers by width or phase.
        series: its name in /metrics behind `sglang_dflash_`; "" if it is in /server_info only.
        help: of the series.
        label: what tells several numbers apart.
        goes_down: whether the series is a gauge.
    """

    key: str
    source: Callable[[Figures], Any]
    series: str = ""
    help: str = ""
    label: str = ""
    goes_down: bool = False


# Known when the server starts.
SET_UP = (
    Figure("worker", lambda s: s.worker),
    Figure("version", lambda s: version("sglang-dflash")),
    Figure("tensor_parallel", lambda s: s.tp.size),
    Figure("block_size", lambda s: s.options.verify_block),
    Figure("trained_block_size", lambda s: s.model.config.block_size),
    Figure("draft_head_bytes", lambda s: s.head_bytes.once),
    Figure("draft_head_bytes_per_request", lambda s: s.head_bytes.per_request),
    Figure("window", lambda s: s.options.reach.tokens),
    Figure("sinks", lambda s: s.options.reach.sinks),
    Figure("draft_kv_entries", lambda s: s.draft_kv_entries),
    Figure("draft_kv_groups", lambda s: [shown_group(group) for group in s.drafter.groups]),
    Figure("recurrent_rollback", lambda s: s.rollback and s.rollback.name),
    Figure("recurrent_scratch_bytes", lambda s: s.rollback and s.rollback.scratch_bytes),
    Figure("draft_kv_bytes", lambda s: sum(cache.kv.nbytes for cache in s.caches)),
    Figure("draft_memory_bytes", lambda s: s.memory),
    Figure("draft_kv_dtype", lambda s: str(s.caches[0].kv.dtype).removeprefix("torch.")),
    Figure("lookup_bytes", lambda s: s.lookup and s.lookup.texts.nbytes),
    Figure("draft_attention", lambda s: s.attention),
    Figure("draft_kind", lambda s: s.model.config.head.description),
    Figure("draft_ops", lambda s: type(s.model.ops).__name__),
    Figure("simulated_acceptance", lambda s: s.simulated),
    Figure("context_length", lambda s: s.context_length),
    Figure("draft_max_position_embeddings", lambda s: s.model.config.max_position_embeddings),
)
# What steps change, and what the log has on lines of its own.
COUNTS = (
    Figure("warnings", lambda s: [warning._asdict() for warning in s.warnings]),
    Figure("draft_kv_live_share", lambda s: round(min(c.live_share() for c in s.caches), 4)),
    Figure("verify_steps", lambda s: s.counts.drafted.steps,
           "verify_steps", "Verify steps, one per live request and forward."),
    Figure("committed_tokens", lambda s: s.counts.drafted.tokens,
           "committed_tokens", "Tokens kept from verify steps, bonus tokens included. Divided by "
           "verify_steps, the acceptance length. sglang:spec_accept_length is larger: it is of the "
           "time since SGLang's last log line, and counts tokens that no request keeps."),
    Figure("acceptance_length", lambda s: s.counts.acceptance_length),
    Figure("accepted_drafts", lambda s: s.counts.accepted, "accepted_drafts",
           "Verify steps in which the drafted token at this position was accepted and kept.",
           label="position"),
    Figure("acceptance_by_position", lambda s: s.counts.by_position()),
    Figure("undrafted_steps", lambda s: s.counts.undrafted.steps,
           "undrafted_steps", "Decode steps of live requests without drafts."),
    Figure("undrafted_tokens", lambda s: s.counts.undrafted.tokens,
           "undrafted_tokens", "Tokens kept from undrafted steps."),
    Figure("steps_by_source", lambda s: s.lookup and s.draft_counts.steps_by_source),
    Figure("accepted_drafts_by_source", lambda s: s.lookup and s.draft_counts.accepted_by_source),
    Figure("acceptance_alarm", lambda s: s.watch.alarm.raised, "acceptance_alarm",
           "1 while the acceptance length stays near 1, else 0.", goes_down=True),
    Figure("recent_acceptance_length", lambda s: s.watch.recent_acceptance_length),
    Figure("nonfinite_outputs", lambda s: s.draft_counts.nonfinite,
           "nonfinite_outputs", "Outputs of the draft that held NaN or Inf."),
    Figure("draft_kv_received_bytes", lambda s: s.pages.received_bytes, "draft_kv_received_bytes",
           "Draft K/V asked of prefill servers: the pages that drafts can see."),
    Figure("loaded_back_tokens", lambda s: s.host_tier.loaded if s.host_tier else 0,
           "loaded_back_tokens", "Tokens whose K/V the hierarchical cache loaded from the host."),
    Figure("loaded_back_draft_kv", lambda s: s.host_tier.loaded_draft if s.host_tier else 0,
           "loaded_back_draft_kv", "Of these, tokens whose draft K/V came back too: all, or the "
           "last ones if every draft layer slides."),
    Figure("draft_context_share", lambda s: s.context_share),
    Figure("", lambda s: s.draft_counts.context_sought, "draft_context_sought",
           "Context tokens that drafts were to see, per step, request and ring."),
    Figure("", lambda s: s.draft_counts.context_found, "draft_context_found",
           "Those of them whose draft K/V was live. Divided by draft_context_sought, a low share "
           "means that the draft KV cache is too small."),
    Figure("width_steps", lambda s: {str(w): steps for w, steps in s.width_steps.items()},
           "steps", "Decode steps of a batch, by verify width.", label="width"),
    Figure("decode_steps", lambda s: sum(s.width_steps.values())),
    Figure("step_milliseconds", lambda s: s.times.step_milliseconds),
    Figure("step_shares", lambda s: s.times.shares()),
    Figure("host_seconds", lambda s: {k: round(v, 6) for k, v in s.times.seconds.items()},
           "host_seconds", "Host time of decode steps, by phase; on an accelerator, the time to "
           "launch it.", label="phase"),
)  # fmt: skip


def shown_group(group: KVGroup) -> dict[str, Any]:
    """A draft KV cache, and the layers that it is of."""
    return {
        "layers": list(group.layers.numbers),
        "window": group.reach.tokens,
        "sinks": group.reach.sinks,
        "entries": group.cache.num_entries,
        "is_ring": isinstance(group.cache, RingKVCache),
    }


class Series:
    """The table's series of this process, with the labels of SGLang's own."""

    def __init__(self, sources: Figures, labels: Mapping[str, Any]) -> None:
        # Imported late: SGLang first sets the directory in which its processes share metrics.
        from prometheus_client import Counter, Gauge

        self._sources, self._labels = sources, labels
        self._metrics: list[tuple[Figure, Any]] = []
        self._shown: dict[tuple[str, int | str], float] = {}
        for row in COUNTS:
            if row.series:
                names = [*labels, row.label] if row.label else [*labels]
                options = {"multiprocess_mode": "mostrecent"} if row.goes_down else {}
                metric_class: Any = Gauge if row.goes_down else Counter
                metric = metric_class(f"sglang_dflash_{row.series}", row.help, names, **options)
                self._metrics.append((row, metric))
        self.update(first=True)

    def update(self, first: bool = False) -> None:
        """Show the values of now. A change is a write to a file.

        Args:
            first: show zeros too.
        """
        for row, metric in self._metrics:
            for at, value in _numbered(row.source(self._sources)):
                change = value - self._shown.get((row.series, at), 0)
                if not change and not first:
                    continue
                self._shown[row.series, at] = value
                series = metric.labels(**self._labels, **({row.label: at} if row.label else {}))
                if row.goes_down:
                    series.set(value)
                else:
                    series.inc(change)


def _numbered(value: Any) -> Iterable[tuple[int | str, float]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return enumerate(value, 1) if isinstance(value, Sequence) else [(0, value)]


@dataclass(eq=False, kw_only=True)
class Figures:
    """The figures of one server, and where they come from.

    Attributes:
        worker: the name of its class.
        tp: the first rank logs what is warned of.
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
    tp: TensorParallel
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
        counters, speaks = self.drafter.counters, self.tp.rank == 0
        self.watch = DraftWatch(
            counters, self.draft_kv_entries, self.warnings, speaks, self.not_paying
        )
        self._series = None if self.labels is None else Series(self, self.labels)
        show_info(self.labels, server.labels(self.describe()))

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
        counts = {row.key: row.source(self) for row in COUNTS if row.key in server.JUDGED_BY}
        device = self.caches[0].kv.device.type
        state = {
            "dflash": counts | dict(self.policy.report()),
            "machine": {"accelerator": None if device == "cpu" else device},
        }
        judged = server.ServerInfo({"internal_states": [state]})
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


def show_info(of_process: Mapping[str, Any] | None, of_server: Mapping[str, str]) -> None:
    """A series that tells by its labels what serves.

    Args:
        of_process: labels of all series of this process; None for no series.
        of_server: see `serving.metrics.server.labels`.
    """
    if of_process is None:
        return
    from prometheus_client import Gauge  # Late, as in `Series`.

    shown = {**of_process, **of_server}
    info = Gauge("sglang_dflash_info", INFO_HELP, list(shown), multiprocess_mode="mostrecent")
    info.labels(**shown).set(1)


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
