"""A running server, described once: for its log, /metrics, `doctor` and the labels of a
benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.serving.metrics import break_even

OURS, BUILTIN = "sglang-dflash", "builtin"
NOT_KNOWN = "not known"
# Verify steps before acceptance is judged.
ENOUGH_STEPS = 100
# What `plainly` and `losing` read of a report, beside the width policy's.
JUDGED_BY = (
    "verify_steps", "committed_tokens", "undrafted_steps", "undrafted_tokens", "width_steps",
    "decode_steps", "step_shares",
)  # fmt: skip
# Share of steps without drafts from which an adaptive server is called a plain one.
_PLAIN = 0.9


def labels(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels that tell one server of ours from another.

    Args:
        report: our worker's, as /server_info shows it.
    """
    window = report.get("window")
    return {
        "worker": OURS,
        "block": str(report.get("block_size", NOT_KNOWN)),
        "window": "all" if window is None else str(window),
        "version": report.get("version", NOT_KNOWN),
    }


def set_up(report: Mapping[str, Any]) -> str:
    """A server of ours on one line."""
    return f"{_who(report)}, {_draft_kv(report)}"


def _who(report: Mapping[str, Any]) -> str:
    """See `labels`."""
    label, trained = labels(report), report.get("trained_block_size")
    block = "" if trained in (None, report.get("block_size")) else f" (trained for {trained})"
    # What its head has stands behind a colon.
    draft_kind = report.get("draft_kind", "DFlash").partition(":")[0]
    return (
        f"{label['worker']} {label['version']}, {draft_kind}, block {label['block']}{block}, "
        f"window {label['window']}, width {report.get('width', NOT_KNOWN)}"
    )


def _draft_kv(report: Mapping[str, Any]) -> str:
    entries, size = report.get("draft_kv_entries") or 0, report.get("draft_kv_bytes") or 0
    return f"draft KV {entries:,} entries in {size / 2**20:,.0f} MiB"


@dataclass(frozen=True)
class ServerInfo:
    """An answer of /server_info, of any SGLang server."""

    info: Mapping[str, Any]

    @property
    def states(self) -> list[Mapping[str, Any]]:
        """The state of every data-parallel rank."""
        return list(self.info.get("internal_states") or [])

    @property
    def reports(self) -> list[Mapping[str, Any]]:
        """Our worker's report of every data-parallel rank; empty if another worker serves."""
        return [state["dflash"] for state in self.states if state.get("dflash")]

    @property
    def busiest(self) -> Mapping[str, Any]:
        """Our worker's report of the rank with the most decode steps, of which times are told:
        another may have had no traffic. Empty if another worker serves."""
        return max(self.reports, key=lambda report: report.get("decode_steps", 0), default={})

    def values(self, name: str) -> list[Any]:
        """Return the values that the ranks report as `name`; ranks that report none are left
        out."""
        return [report[name] for report in self.reports if report.get(name) is not None]

    def least(self, name: str) -> float | None:
        return min(self.values(name), default=None)

    @property
    def algorithm(self) -> str:
        """The speculative algorithm in capitals; "" for plain decoding."""
        return (self.info.get("speculative_algorithm") or "").upper()

    @property
    def only_prefills(self) -> bool:
        """True of a prefill server, which drafts nothing."""
        return self.info.get("disaggregation_mode") == "prefill"

    @property
    def builtin_reasons(self) -> list[str]:
        """Reasons why SGLang's own DFLASH worker serves in place of ours."""
        return sorted(
            {str(state.get("dflash_builtin_reason") or "") for state in self.states} - {""}
        )

    @property
    def worker(self) -> str:
        """`OURS`, `BUILTIN`, "plain decoding" or another algorithm."""
        if self.reports:
            return OURS
        return BUILTIN if self.algorithm == "DFLASH" else self.algorithm or "plain decoding"

    @property
    def verify_steps(self) -> int:
        """Verify steps of all ranks so far."""
        return sum(self.values("verify_steps"))

    @property
    def acceptance_length(self) -> float | None:
        """Acceptance length of all ranks so far; None without a verify step. For another worker,
        SGLang's own figure since its last log line."""
        if not self.reports:
            lengths = [state.get("avg_spec_accept_length") for state in self.states]
            return min((x for x in lengths if x), default=None)
        steps = self.verify_steps
        return sum(self.values("committed_tokens")) / steps if steps else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per step of all ranks so far, steps without drafts included; None before the
        first, or if another worker serves."""
        steps = self.verify_steps + sum(self.values("undrafted_steps"))
        tokens = sum(self.values("committed_tokens")) + sum(self.values("undrafted_tokens"))
        return tokens / steps if steps else None

    @property
    def target_kv_tokens(self) -> int | None:
        """Tokens of the smallest KV pool of all ranks."""
        capacities = [
            (state.get("memory_usage") or {}).get("token_capacity") for state in self.states
        ]
        return min((tokens for tokens in capacities if tokens), default=None)

    def facts(self) -> dict[str, Any]:
        """Return what a user asks first, by name; None for what the server does not tell."""
        ours: Mapping[str, Any] = self.reports[0] if self.reports else {}
        length, every = self.acceptance_length, self.tokens_per_step
        names = ("block_size", "trained_block_size", "window", "draft_kv_entries", "draft_kv_bytes")
        return {
            "worker": self.worker,
            "worker_reason": ", ".join(self.builtin_reasons) or None,
            **{name: ours.get(name) for name in names},
            "acceptance_length": None if length is None else round(length, 4),
            "verify_steps": self.verify_steps,
            "tokens_per_step": None if every is None else round(every, 4),
            **{name: self.busiest.get(name) for name in ("step_milliseconds", "step_shares")},
            "break_even": [point._asdict() for point in self.break_even],
            "break_even_at_least": self.break_even_at_least,
            "judged": self.verify_steps >= ENOUGH_STEPS,
            "decodes_plainly": self.plainly is not None,
            "target_kv_tokens": self.target_kv_tokens,
        }

    def set_up(self) -> str:
        """The worker that serves and its settings, on one line."""
        return set_up(self.reports[0]) if self.reports else self.worker

    @property
    def plainly(self) -> str | None:
        """A sentence that drafts do not pay and are left out, as an adaptive width does; or
        None."""
        undrafted, length = sum(self.values("undrafted_steps")), self.acceptance_length
        steps, widths = undrafted + self.verify_steps, self.values("width_steps")
        # Steps of grammars and logit processors have no drafts either, and another width.
        plain = sum(counts.get("1", 0) for counts in widths) >= _PLAIN * sum(
            sum(counts.values()) for counts in widths
        )
        chosen = "adaptive" in self.values("width") and plain
        if not chosen or undrafted < max(ENOUGH_STEPS, _PLAIN * steps):
            return None
        with_drafts = "" if length is None else f"; those with drafts kept {length:.2f} tokens each"
        return (
            "drafts do not pay on this traffic, so it decodes plainly: "
            f"{undrafted:,} of {steps:,} steps had none{with_drafts}"
        )

    @property
    def break_even(self) -> list[break_even.BreakEven]:
        """Acceptance lengths from which drafts pay; empty if the server measures no plain steps."""
        return break_even.measured(self.busiest)

    @property
    def break_even_at_least(self) -> float | None:
        """A lower bound of break-even on a server that always drafts; None if it is not known."""
        enough = self.busiest.get("decode_steps", 0) >= ENOUGH_STEPS
        # Others have plain steps among those that are timed.
        always = set(self.values("width")) == {"fixed"}
        if not enough or not always or self._machine.get("accelerator") is not None:
            return None
        return break_even.least(self.busiest)

    @property
    def losing(self) -> str | None:
        """A sentence that drafts cannot pay on a server that always drafts; or None."""
        bound, length = self.break_even_at_least, self.acceptance_length
        enough = self.verify_steps >= ENOUGH_STEPS
        if bound is None or length is None or length >= bound or not enough:
            return None
        return (
            f"drafts do not pay on this traffic: acceptance length {length:.2f}, and a step takes "
            f"{bound:.2f} times as long as a plain one, or more"
        )

    def break_even_line(self) -> str | None:
        """The acceptance length from which drafts pay, in words, or that it is not known; None for
        a server without our worker, and for one that has just started."""
        if self.busiest.get("decode_steps", 0) < ENOUGH_STEPS:
            return None
        if self.break_even:
            now = self.busiest.get("width_now")
            return (
                f"drafts pay from this acceptance length: {break_even.told(self.break_even)}; "
                f"by the latest text the server now takes width {now}"
            )
        if set(self.values("width")) != {"fixed"}:
            return "from which acceptance length drafts pay is not measured yet: send more requests"
        if self.break_even_at_least is not None:
            return (
                f"drafts pay from an acceptance length above {self.break_even_at_least:.2f}: a "
                "plain step, which is not measured, takes no longer than a step without its drafts"
            )
        return (
            "from which acceptance length drafts pay is not measured, because a fixed width runs "
            "no plain steps: `sglang-dflash bench` compares, and --speculative-dflash-width "
            "adaptive measures it"
        )

    def lines(self) -> list[str]:
        """The facts, in lines: who serves, its memory, and what drafts are worth."""
        memory = [_draft_kv(self.reports[0])] if self.reports else []
        if self.target_kv_tokens is not None:
            memory.append(f"target KV {self.target_kv_tokens:,} tokens")
        worker = _who(self.reports[0]) if self.reports else self.worker
        return [worker, *filter(None, (", ".join(memory), self._acceptance()))]

    def _acceptance(self) -> str | None:
        length, steps = self.acceptance_length, self.verify_steps
        if length is not None:
            ours = f" over {steps:,} steps with drafts since the start"
            source = ours if self.reports else " (SGLang's own figure)"
            return ", ".join([f"acceptance length {length:.2f}{source}", *self._without_drafts()])
        if not self.algorithm or self.only_prefills:
            return None
        reason = ": no verify step" if self.reports else " (SGLang tells it between log lines)"
        return f"acceptance length not known yet{reason}"

    def step_line(self) -> str | None:
        """The time of a decode step and its shares by part, on one line; None before there were
        enough steps, or if another worker serves."""
        ours = self.busiest
        shares = ours.get("step_shares")
        if not shares or ours.get("decode_steps", 0) < ENOUGH_STEPS:
            return None
        total = f"a step takes {ours['step_milliseconds']:.1f} ms"
        if self._machine.get("accelerator") is None:
            return f"{total}: {', '.join(f'{part} {share:.0%}' for part, share in shares.items())}"
        launched = (f"{part} {share:.0%}" for part, share in shares.items() if part != "host")
        return f"{total}; the host launches {', '.join(launched)}, and works or waits in the rest"

    def _without_drafts(self) -> list[str]:
        """In words, steps without drafts: of width 1, or with one token per step of a request."""
        undrafted, every = sum(self.values("undrafted_steps")), self.tokens_per_step
        if not undrafted or every is None:
            return []
        steps = undrafted + self.verify_steps
        return [f"{every:.2f} tokens per step over all {steps:,} ({undrafted:,} without drafts)"]

    @property
    def _machine(self) -> Mapping[str, Any]:
        machines = [state["machine"] for state in self.states if state.get("machine")]
        return machines[0] if machines else {}

    def machine(self) -> dict[str, str]:
        """The server's dtype, device, engine and torch version."""
        machine = self._machine
        cpu = (
            f"CPU, {machine.get('cores')} cores of {machine.get('processor')}"
            if machine
            else NOT_KNOWN
        )
        # A server without this package tells only the dtype that was asked for.
        dtype, version = self.info.get("dtype"), self.info.get("version")
        return {
            "dtype": machine.get("dtype") or (NOT_KNOWN if dtype in (None, "auto") else dtype),
            "device": machine.get("accelerator") or cpu,
            "engine": f"SGLang {version}" if version else NOT_KNOWN,
            "torch": machine.get("torch", NOT_KNOWN),
        }
