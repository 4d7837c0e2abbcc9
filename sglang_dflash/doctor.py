"""What is wrong with a running server, and what to do: one function per finding, from /server_info,
and /metrics if it has one. The numbers that they read are explained in docs/operating.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import requests

from sglang_dflash.drafting.acceptance_length import CAUSES, JUDGED_STEPS, LOW, LOW_CONTEXT_SHARE

# An acceptance length below this may be slower than plain decoding.
USEFUL = 2.0
# More steps without drafts than this share are worth a word.
UNDRAFTED_SHARE = 0.25
# Verify steps before acceptance is judged.
ENOUGH_STEPS = 100


class NotReadable(Exception):
    """There is no answer that could be judged. The message names the URL and the reason."""


@dataclass(frozen=True)
class Reading:
    """One reading of a server.

    Attributes:
        info: the answer of /server_info.
        metrics: of /metrics, each series' values over all labels, by name; None without
            --enable-metrics.
    """

    info: Mapping[str, Any]
    metrics: Mapping[str, list[float]] | None = None

    @property
    def states(self) -> list[Mapping[str, Any]]:
        """The state of every data-parallel rank."""
        return list(self.info.get("internal_states") or [])

    @property
    def reports(self) -> list[Mapping[str, Any]]:
        """Our worker's report of every data-parallel rank; empty if another worker serves."""
        return [state["dflash"] for state in self.states if state.get("dflash")]

    def total(self, name: str) -> int:
        """A count of our worker, over all ranks. 0 if it does not report it."""
        return sum(report.get(name) or 0 for report in self.reports)

    def any(self, name: str) -> bool:
        """Whether a rank reports `name` as true."""
        return any(report.get(name) for report in self.reports)

    def least(self, name: str) -> float | None:
        """The smallest value that a rank reports; None if none does."""
        values = [report[name] for report in self.reports if report.get(name) is not None]
        return min(values, default=None)

    def metric(self, name: str) -> float | None:
        """The sum of a series in /metrics; None if it is not there."""
        values = (self.metrics or {}).get(name)
        return sum(values) if values else None


def read(url: str, timeout_s: float, api_key: str | None = None) -> Reading:
    """Ask the server.

    Args:
        url: as for other clients, with or without a path such as /v1.
        timeout_s: for each answer, in seconds.
        api_key: of a server with --api-key.

    Raises:
        NotReadable: no server, no answer in time, or not that of an SGLang server.
    """
    base = _base(url)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    answer = _get(f"{base}/server_info", timeout_s, headers)
    if answer.status_code in (401, 403):
        raise NotReadable(f"{base}/server_info answers {answer.status_code}; give --api-key")
    try:
        info = answer.json() if answer.ok else None
    except requests.JSONDecodeError:
        info = None
    if not isinstance(info, dict) or "internal_states" not in info:
        raise NotReadable(
            f"{base}/server_info answers {answer.status_code} and is not that of an SGLang server"
        )
    shown = _get(f"{base}/metrics", timeout_s, headers)
    return Reading(info, series(shown.text) if shown.ok else None)


def _base(url: str) -> str:
    base = url if "://" in url else f"http://{url}"
    return base.rstrip("/").removesuffix("/v1")


def _get(url: str, timeout_s: float, headers: dict[str, str]) -> requests.Response:
    try:
        return requests.get(url, timeout=timeout_s, headers=headers)
    except requests.Timeout as error:
        raise NotReadable(
            f"{url} gave no answer within {timeout_s:g} s: the scheduler hangs, or is gone"
        ) from error
    except requests.RequestException as error:
        raise NotReadable(f"{url} cannot be reached: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The innermost reason: requests wraps what the system says three times."""
    while (inner := error.__context__ or error.__cause__) is not None:
        error = inner
    return str(error) or type(error).__name__


def series(text: str) -> dict[str, list[float]]:
    """Values by name from Prometheus's text format, labels dropped."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if not head or head.startswith("#"):
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            found.setdefault(head.partition("{")[0], []).append(number)
    return found


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        name: does not change between versions.
        problem: what was found, with numbers.
        advice: what to do.
    """

    name: str
    problem: str
    advice: str


def no_dflash(reading: Reading) -> Finding | None:
    algorithm = reading.info.get("speculative_algorithm")
    if (algorithm or "").upper() == "DFLASH":
        return None
    serves = f"--speculative-algorithm {algorithm}" if algorithm else "plain decoding"
    return Finding(
        "no-dflash",
        f"the server runs {serves}, no DFlash draft",
        "start it with --speculative-algorithm DFLASH --speculative-draft-model-path DRAFT",
    )


def builtin_worker(reading: Reading) -> Finding | None:
    if no_dflash(reading) is not None or reading.reports:
        return None
    shown = (state.get("dflash_builtin_reason") for state in reading.states)
    reasons = {str(reason) for reason in shown if reason}
    if reasons:
        return Finding(
            "builtin-worker",
            f"SGLang's built-in DFLASH worker serves, because of {', '.join(sorted(reasons))}",
            "leave that out to get sglang-dflash's worker (docs/limits.md), or keep it: "
            "everything but what this package adds works",
        )
    return Finding(
        "builtin-worker",
        "SGLang's built-in DFLASH worker serves, and the plugin of sglang-dflash is not loaded",
        "run `sglang-dflash env` in the server's environment: it tells why",
    )


def simulated_acceptance(reading: Reading) -> Finding | None:
    tokens = reading.least("simulated_acceptance")
    if tokens is None:
        return None
    return Finding(
        "simulated-acceptance",
        f"SGLANG_SIMULATE_ACC_LEN commits {tokens:g} tokens per step, right or wrong: outputs have "
        "no meaning",
        "unset that variable, and restart",
    )


def nonfinite_outputs(reading: Reading) -> Finding | None:
    count = reading.total("nonfinite_outputs")
    if not count:
        return None
    return Finding(
        "nonfinite-outputs",
        f"{count} outputs of the draft were NaN or Inf; they were never accepted",
        "serve in bfloat16 or float32 if this is float16; otherwise the draft checkpoint is "
        "broken: get it again, or take another",
    )


def low_acceptance(reading: Reading) -> Finding | None:
    """The alarm, or else the acceptance length since the start."""
    if simulated_acceptance(reading) is not None:
        return None
    recent = reading.least("recent_acceptance_length")
    if reading.any("acceptance_alarm") and recent is not None:
        return Finding(
            "acceptance-alarm",
            f"acceptance length {recent:.2f} over the last {JUDGED_STEPS} verify steps: next to no "
            "draft is accepted",
            _causes(_until_found(reading)),
        )
    steps, tokens = reading.total("verify_steps"), reading.total("committed_tokens")
    length = tokens / steps if steps else None
    if not reading.reports:
        # SGLang's own figure, since its last log line.
        lengths = [state.get("avg_spec_accept_length") for state in reading.states]
        length, steps = min((x for x in lengths if x), default=None), ENOUGH_STEPS
    if length is None or steps < ENOUGH_STEPS or length >= USEFUL:
        return None
    if length < LOW:
        return Finding(
            "acceptance-near-1",
            f"acceptance length {length:.2f}: next to no draft is accepted",
            _causes(_until_found(reading)),
        )
    if _is_adaptive(reading):
        # It drafts as long as that pays.
        return None
    return Finding(
        "acceptance-below-2",
        f"acceptance length {length:.2f}: plain decoding may be faster",
        _causes("compare with `sglang-dflash bench`"),
    )


def _is_adaptive(reading: Reading) -> bool:
    return any(report.get("width") == "adaptive" for report in reading.reports)


def _until_found(reading: Reading) -> str:
    if _is_adaptive(reading):
        return "meanwhile the server drafts rarely (--speculative-dflash-width adaptive)"
    return (
        "until it is found, let the server draft less (--speculative-dflash-width adaptive) or not "
        "at all (leave out --speculative-algorithm)"
    )


def _causes(otherwise: str) -> str:
    return f"look for {'; '.join(CAUSES)}; {otherwise}"


def low_context_share(reading: Reading) -> Finding | None:
    share = reading.least("draft_context_share")
    if share is None or share >= LOW_CONTEXT_SHARE:
        return None
    entries = reading.least("draft_kv_entries") or 0
    return Finding(
        "draft-kv-too-small",
        f"the draft KV cache held {share:.0%} of the context that drafts were to see",
        f"raise --speculative-dflash-draft-kv-tokens (now {entries:.0f})",
    )


def many_undrafted(reading: Reading) -> Finding | None:
    # With an adaptive width, most of them are its choice.
    undrafted = 0 if _is_adaptive(reading) else reading.total("undrafted_steps")
    steps = undrafted + reading.total("verify_steps")
    if undrafted < ENOUGH_STEPS or undrafted <= UNDRAFTED_SHARE * steps:
        return None
    return Finding(
        "many-undrafted",
        f"{undrafted / steps:.0%} of the decode steps had no drafts: their requests have a custom "
        "logit processor",
        "send requests without one where it is not needed; such a request takes one token per step",
    )


def long_contexts(reading: Reading) -> Finding | None:
    for report in reading.reports:
        served, trained = report.get("context_length"), report.get("draft_max_position_embeddings")
        if served and trained and served > trained:
            return Finding(
                "long-contexts",
                f"the server takes contexts of {served} tokens, the draft was made for {trained}: "
                "beyond that acceptance may fall",
                f"set --context-length {trained} if requests are shorter, or a draft window "
                "(--speculative-draft-window-size) if they are not",
            )
    return None


def ignored_seeds(reading: Reading) -> Finding | None:
    if not reading.any("ignored_seeds"):
        return None
    return Finding(
        "ignored-seeds",
        "requests with a seed were sampled without it",
        "start the server with --enable-deterministic-inference, or leave the seeds out",
    )


def retractions(reading: Reading) -> Finding | None:
    count = reading.metric("sglang:num_retracted_requests_total")
    requests = reading.metric("sglang:num_requests_total")
    if not count or not requests or count <= 0.05 * requests:
        return None
    return Finding(
        "retractions",
        f"{count:.0f} retractions in {requests:.0f} requests: the KV pool is too small for what "
        "runs at once, and their prompts are computed again",
        "lower --max-running-requests, or give the pool more memory (--mem-fraction-static)",
    )


CHECKS: tuple[Callable[[Reading], Finding | None], ...] = (
    no_dflash,
    builtin_worker,
    simulated_acceptance,
    nonfinite_outputs,
    low_acceptance,
    low_context_share,
    many_undrafted,
    long_contexts,
    ignored_seeds,
    retractions,
)


def examine(reading: Reading) -> list[Finding]:
    """All findings, the gravest first."""
    found = (check(reading) for check in CHECKS)
    return [finding for finding in found if finding is not None]
