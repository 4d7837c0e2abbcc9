"""A running server, described once: for its log, /metrics, `doctor` and the labels of a
benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OURS, BUILTIN = "sglang-dflash", "builtin"
NOT_KNOWN = "not known"
# Verify steps before acceptance is judged.
ENOUGH_STEPS = 100


def labels(report: Mapping[str, Any]) -> dict[str, str]:
    """What tells one server of ours from another.

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
    """A server of ours on one line. See `labels`."""
    of, trained = labels(report), report.get("trained_block_size")
    block = "" if trained in (None, report.get("block_size")) else f" (trained for {trained})"
    entries, size = report.get("draft_kv_entries") or 0, report.get("draft_kv_bytes") or 0
    return (
        f"{of['worker']} {of['version']}, {report.get('draft_kind', 'DFlash')}, "
        f"block {of['block']}{block}, window {of['window']}, "
        f"width {report.get('width', NOT_KNOWN)}, draft KV {entries:,} entries in "
        f"{size / 2**20:,.0f} MiB"
    )


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

    def values(self, name: str) -> list[Any]:
        """What the ranks report as `name`; without those that report nothing."""
        return [report[name] for report in self.reports if report.get(name) is not None]

    def least(self, name: str) -> float | None:
        return min(self.values(name), default=None)

    @property
    def algorithm(self) -> str:
        """The speculative algorithm in capitals; "" for plain decoding."""
        return (self.info.get("speculative_algorithm") or "").upper()

    @property
    def builtin_reasons(self) -> list[str]:
        """Why SGLang's own DFLASH worker serves in place of ours."""
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
        """Of all ranks, so far."""
        return sum(self.values("verify_steps"))

    @property
    def acceptance_length(self) -> float | None:
        """So far, of all ranks; None without a verify step. Of another worker SGLang's own figure,
        since its last log line."""
        if not self.reports:
            lengths = [state.get("avg_spec_accept_length") for state in self.states]
            return min((x for x in lengths if x), default=None)
        steps = self.verify_steps
        return sum(self.values("committed_tokens")) / steps if steps else None

    @property
    def tokens_per_step(self) -> float | None:
        """So far, of all ranks, steps without drafts included; None before, or if another worker
        serves."""
        steps = self.verify_steps + sum(self.values("undrafted_steps"))
        tokens = sum(self.values("committed_tokens")) + sum(self.values("undrafted_tokens"))
        return tokens / steps if steps else None

    @property
    def target_kv_tokens(self) -> int | None:
        """Of the smallest KV pool of all ranks."""
        found = [(state.get("memory_usage") or {}).get("token_capacity") for state in self.states]
        return min((tokens for tokens in found if tokens), default=None)

    def facts(self) -> dict[str, Any]:
        """What a user asks first, by name; None for what the server does not tell."""
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
            "step_milliseconds": ours.get("step_milliseconds"),
            "step_shares": ours.get("step_shares"),
            "judged": self.verify_steps >= ENOUGH_STEPS,
            "target_kv_tokens": self.target_kv_tokens,
        }

    def set_up(self) -> str:
        """What serves, on one line."""
        return set_up(self.reports[0]) if self.reports else self.worker

    def line(self) -> str:
        """The facts on one line."""
        words = [self.set_up()]
        if self.target_kv_tokens is not None:
            words.append(f"target KV {self.target_kv_tokens:,} tokens")
        length, steps = self.acceptance_length, self.verify_steps
        if length is not None:
            over = (
                f" over {steps:,} steps with drafts" if self.reports else " (SGLang's own figure)"
            )
            words.append(f"acceptance length {length:.2f}{over}")
            words += self._without_drafts()
        elif self.algorithm:
            why = ": no verify step" if self.reports else " (SGLang tells it between log lines)"
            words.append(f"acceptance length not known yet{why}")
        return ", ".join(words)

    def step_line(self) -> str | None:
        """Where the time of a decode step goes; None before there were enough, or if another
        worker serves."""
        ours: Mapping[str, Any] = self.reports[0] if self.reports else {}
        shares = ours.get("step_shares")
        if not shares or ours.get("decode_steps", 0) < ENOUGH_STEPS:
            return None
        took = f"a step takes {ours['step_milliseconds']:.1f} ms"
        if self._machine.get("accelerator") is None:
            return f"{took}: {', '.join(f'{part} {share:.0%}' for part, share in shares.items())}"
        launched = (f"{part} {share:.0%}" for part, share in shares.items() if part != "host")
        return f"{took}; the host launches {', '.join(launched)}, and works or waits in the rest"

    def _without_drafts(self) -> list[str]:
        """In words, steps without drafts: of width 1, or with one token per step of a request."""
        undrafted, every = sum(self.values("undrafted_steps")), self.tokens_per_step
        if not undrafted or every is None:
            return []
        steps = undrafted + self.verify_steps
        return [f"{every:.2f} tokens per step over all {steps:,} ({undrafted:,} without drafts)"]

    @property
    def _machine(self) -> Mapping[str, Any]:
        told = [state["machine"] for state in self.states if state.get("machine")]
        return told[0] if told else {}

    def machine(self) -> dict[str, str]:
        """What the server says of where and in what it computes."""
        found = self._machine
        cpu = f"CPU, {found.get('cores')} cores of {found.get('processor')}" if found else NOT_KNOWN
        # Of a server without this package: what was asked for.
        asked, version = self.info.get("dtype"), self.info.get("version")
        return {
            "dtype": found.get("dtype") or (NOT_KNOWN if asked in (None, "auto") else asked),
            "device": found.get("accelerator") or cpu,
            "engine": f"SGLang {version}" if version else NOT_KNOWN,
            "torch": found.get("torch", NOT_KNOWN),
        }
