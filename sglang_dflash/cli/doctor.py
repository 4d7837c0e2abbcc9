"""`sglang-dflash doctor`: what is wrong with a running server, and what to do, by its /server_info.
The numbers that are read are explained in docs/operating.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import requests

from sglang_dflash.cli import Failed
from sglang_dflash.drafting.acceptance_length import CAUSES, JUDGED_STEPS, LOW, LOW_CONTEXT_SHARE

# An acceptance length below this may be slower than plain decoding.
USEFUL = 2.0
# More steps without drafts than this share are worth a word.
UNDRAFTED_SHARE = 0.25
# Verify steps before acceptance is judged.
ENOUGH_STEPS = 100


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", help="the server, such as http://127.0.0.1:30000")
    add("--timeout", type=float, default=30, metavar="S", help="seconds (default: %(default)s)")
    add("--api-key", help="of a server that asks for one")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Raises Failed, which makes the exit status 1, if anything is wrong."""
    steps = 0
    try:
        reading = read(args.url, args.timeout, args.api_key)
        findings, steps = examine(reading), sum(reading.values("verify_steps"))
    except NotReadable as error:
        advice = "check the URL, and the server's log and process (docs/operating.md)"
        findings = [Finding("not-reachable", str(error), advice)]
    if args.json:
        print(json.dumps({"url": args.url, "findings": [f._asdict() for f in findings]}))
    else:
        print(as_text(findings, steps))
    if findings:
        sys.stdout.flush()
        raise Failed(f"doctor: {len(findings)} finding{'s'[: len(findings) > 1]}")


def as_text(findings: list[Finding], steps: int) -> str:
    """One line per finding, and what to do below it. `steps`: verify steps so far."""
    if not findings:
        early = f"; {steps} verify steps are too few to judge the draft, send more requests"
        return "nothing wrong found" + (early if steps < ENOUGH_STEPS else "")
    return "\n".join(f"{f.name}: {f.problem}\n    {f.advice}" for f in findings)


class NotReadable(Exception):
    """There is no answer that could be judged. The message names the URL and the reason."""


@dataclass(frozen=True)
class Reading:
    """One answer of /server_info."""

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
    url = f"{base}/server_info"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        answer = requests.get(url, timeout=timeout_s, headers=headers)
    except requests.Timeout as error:
        raise NotReadable(
            f"{url} gave no answer within {timeout_s:g} s: the scheduler hangs, or is gone"
        ) from error
    except requests.RequestException as error:
        raise NotReadable(f"{url} cannot be reached: {_reason(error)}") from error
    if answer.status_code in (401, 403):
        raise NotReadable(f"{url} answers {answer.status_code}; give --api-key")
    try:
        info = answer.json() if answer.ok else None
    except requests.JSONDecodeError:
        info = None
    if not isinstance(info, dict) or "internal_states" not in info:
        raise NotReadable(f"{url} answers {answer.status_code} and is not that of an SGLang server")
    return Reading(info)


def _reason(error: BaseException) -> str:
    """The innermost reason: requests wraps what the system says three times."""
    while (inner := error.__context__ or error.__cause__) is not None:
        error = inner
    return str(error) or type(error).__name__


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
