"""What is wrong with a running server, and what to do: from /server_info, and /metrics if it has
one. The numbers that are read are explained in docs/operating.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
        metrics: of /metrics, the sum of each series over all labels, by name; empty without
            --enable-metrics.
    """

    info: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def states(self) -> list[Mapping[str, Any]]:
        """The state of every data-parallel rank."""
        return list(self.info.get("internal_states") or [])

    @property
    def reports(self) -> list[Mapping[str, Any]]:
        """Our worker's report of every data-parallel rank; empty if another worker serves."""
        return [state["dflash"] for state in self.states if state.get("dflash")]

    @property
    def is_adaptive(self) -> bool:
        """Whether the server drafts as long as that pays."""
        return "adaptive" in self.values("width")

    def values(self, name: str) -> list[Any]:
        """What the ranks report as `name`; without those that report nothing."""
        return [report[name] for report in self.reports if report.get(name) is not None]

    def least(self, name: str) -> float | None:
        return min(self.values(name), default=None)


def read(url: str, timeout_s: float, api_key: str | None = None) -> Reading:
    """Ask the server.

    Args:
        url: as for other clients, with or without a path such as /v1.
        timeout_s: for each answer, in seconds.
        api_key: of a server with --api-key.

    Raises:
        NotReadable: no server, no answer in time, or not that of an SGLang server.
    """
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
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
    return Reading(info, series(shown.text) if shown.ok else {})


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


def series(text: str) -> dict[str, float]:
    """Values by name from Prometheus's text format, summed over labels; {} if it is another."""
    # prometheus_client reads its folder from the environment when it is imported.
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        return {}
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


def examine(reading: Reading) -> list[Finding]:
    """All findings, the gravest first."""
    found = [*_worker(reading), *_outputs(reading), *_contained(reading), *_acceptance(reading)]
    return [*found, *_requests(reading)]


def _worker(reading: Reading) -> Iterator[Finding]:
    """Which worker serves."""
    algorithm = reading.info.get("speculative_algorithm")
    shown = {str(state.get("dflash_builtin_reason") or "") for state in reading.states} - {""}
    if (algorithm or "").upper() != "DFLASH":
        serves = f"--speculative-algorithm {algorithm}" if algorithm else "plain decoding"
        yield Finding(
            "no-dflash",
            f"the server runs {serves}, no DFlash draft",
            "start it with --speculative-algorithm DFLASH --speculative-draft-model-path DRAFT",
        )
    elif not reading.reports and shown:
        yield Finding(
            "builtin-worker",
            f"SGLang's built-in DFLASH worker serves, because of {', '.join(sorted(shown))}",
            "leave that out to get sglang-dflash's worker (docs/limits.md), or keep it: "
            "everything but what this package adds works",
        )
    elif not reading.reports:
        yield Finding(
            "builtin-worker",
            "SGLang's built-in DFLASH worker serves, and the plugin of sglang-dflash is not loaded",
            "run `sglang-dflash env` in the server's environment: it tells why",
        )


def _outputs(reading: Reading) -> Iterator[Finding]:
    """What outputs and drafts are worth."""
    simulated = reading.least("simulated_acceptance")
    if simulated is not None:
        yield Finding(
            "simulated-acceptance",
            f"SGLANG_SIMULATE_ACC_LEN commits {simulated:g} tokens per step, right or wrong: "
            "outputs have no meaning",
            "unset that variable, and restart",
        )
    nonfinite = sum(reading.values("nonfinite_outputs"))
    if nonfinite:
        yield Finding(
            "nonfinite-outputs",
            f"{nonfinite} outputs of the draft were NaN or Inf; they were never accepted",
            "serve in bfloat16 or float32 if this is float16; otherwise the draft checkpoint is "
            "broken: get it again, or take another",
        )


def _acceptance(reading: Reading) -> Iterator[Finding]:
    """The alarm, or else the acceptance length since the start."""
    if reading.least("simulated_acceptance") is not None:
        return
    until_found = (
        "until it is found, let the server draft less (--speculative-dflash-width adaptive) or not "
        "at all (leave out --speculative-algorithm)"
    )
    if reading.is_adaptive:
        until_found = "meanwhile the server drafts rarely (--speculative-dflash-width adaptive)"
    look_for = f"look for {'; '.join(CAUSES)}; "
    recent, length = reading.least("recent_acceptance_length"), _length(reading)
    if any(reading.values("acceptance_alarm")) and recent is not None:
        yield Finding(
            "acceptance-alarm",
            f"acceptance length {recent:.2f} over the last {JUDGED_STEPS} verify steps: next to no "
            "draft is accepted",
            look_for + until_found,
        )
    elif length is not None and length < LOW:
        yield Finding(
            "acceptance-near-1",
            f"acceptance length {length:.2f}: next to no draft is accepted",
            look_for + until_found,
        )
    elif length is not None and length < USEFUL and not reading.is_adaptive:
        yield Finding(
            "acceptance-below-2",
            f"acceptance length {length:.2f}: plain decoding may be faster",
            look_for + "compare with `sglang-dflash bench`",
        )


def _length(reading: Reading) -> float | None:
    """The acceptance length so far; None if there are too few verify steps."""
    if not reading.reports:
        # SGLang's own figure, since its last log line.
        lengths = [state.get("avg_spec_accept_length") for state in reading.states]
        return min((x for x in lengths if x), default=None)
    steps = sum(reading.values("verify_steps"))
    return sum(reading.values("committed_tokens")) / steps if steps >= ENOUGH_STEPS else None


def _contained(reading: Reading) -> Iterator[Finding]:
    """Steps that failed, with the server going on."""
    for state in reading.states:
        shown = state.get("containment") or {}
        if shown.get("contained_steps"):
            yield Finding(
                "contained-steps",
                f"{shown['contained_steps']} steps failed and {shown['ended_requests']} requests "
                f"were ended by it; the last error is {shown['last_error']}",
                "the log has a traceback of each kind: report it to SGLang, or here if it names "
                "sglang_dflash",
            )


def _requests(reading: Reading) -> Iterator[Finding]:
    """Requests, and limits of the server, that do not go well together."""
    share = reading.least("draft_context_share")
    if share is not None and share < LOW_CONTEXT_SHARE:
        yield Finding(
            "draft-kv-too-small",
            f"the draft KV cache held {share:.0%} of the context that drafts were to see",
            "raise --speculative-dflash-draft-kv-tokens (now "
            f"{reading.least('draft_kv_entries') or 0:.0f})",
        )
    # With an adaptive width, most of them are its choice.
    undrafted = 0 if reading.is_adaptive else sum(reading.values("undrafted_steps"))
    steps = undrafted + sum(reading.values("verify_steps"))
    if undrafted >= ENOUGH_STEPS and undrafted > UNDRAFTED_SHARE * steps:
        yield Finding(
            "many-undrafted",
            f"{undrafted / steps:.0%} of the decode steps had no drafts: their requests have a "
            "custom logit processor",
            "send requests without one where it is not needed; such a request takes one token per "
            "step",
        )
    served, trained = map(reading.least, ("context_length", "draft_max_position_embeddings"))
    if served and trained and served > trained:
        yield Finding(
            "long-contexts",
            f"the server takes contexts of {served} tokens, the draft was made for {trained}: "
            "beyond that acceptance may fall",
            f"set --context-length {trained} if requests are shorter, or a draft window "
            "(--speculative-draft-window-size) if they are not",
        )
    if any(reading.values("ignored_seeds")):
        yield Finding(
            "ignored-seeds",
            "requests with a seed were sampled without it",
            "start the server with --enable-deterministic-inference, or leave the seeds out",
        )
    names = "sglang:num_retracted_requests_total", "sglang:num_requests_total"
    retracted, requests = (reading.metrics.get(name, 0.0) for name in names)
    if retracted > 0.05 * requests > 0:
        yield Finding(
            "retractions",
            f"{retracted:.0f} retractions in {requests:.0f} requests: the KV pool is too small for "
            "what runs at once, and their prompts are computed again",
            "lower --max-running-requests, or give the pool more memory (--mem-fraction-static)",
        )
