"""`sglang-dflash doctor`: problems of a running server and advice, from its /server_info.

docs/metrics.md explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator

import requests

from sglang_dflash.common.errors import ConfigError, Failed, innermost
from sglang_dflash.common.machine import reach_this_machine
from sglang_dflash.drafting.acceptance_length import CAUSES, JUDGED_STEPS, LOW, LOW_CONTEXT_SHARE
from sglang_dflash.drafting.options import Finding
from sglang_dflash.serving.metrics.server_info import ENOUGH_STEPS, ServerInfo

# SGLang's default address.
DEFAULT_URL = "http://127.0.0.1:30000"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, help="the server (default: %(default)s)")
    add("--timeout", type=float, default=30, metavar="S", help="seconds (default: %(default)s)")
    add("--api-key", help="of a server that asks for one")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Raises Failed, which makes the exit status 1, if anything is wrong; ConfigError if the
    command is."""
    if not 0 < args.timeout <= threading.TIMEOUT_MAX:
        raise ConfigError("timeout", args.timeout, "a positive number of seconds is required")
    if args.api_key is not None and not (args.api_key.isascii() and args.api_key.isprintable()):
        # The value is not shown.
        raise ConfigError("api_key", required="letters, digits and signs of ASCII are required")
    reach_this_machine()
    server = None
    try:
        server = read(args.url, args.timeout, args.api_key)
        findings = examine(server)
    except Failed as error:
        advice = "check the URL, and the server's log and process (docs/operating.md)"
        findings = [Finding("not-reachable", str(error), advice)]
    if args.json:
        facts, rows = server.facts() if server else {}, [f._asdict() for f in findings]
        print(json.dumps({"url": args.url, **facts, "findings": rows}))
    else:
        print(as_text(server, findings))
    if findings:
        sys.stdout.flush()
        raise Failed(f"doctor: {len(findings)} finding{'s'[: len(findings) > 1]}")


def as_text(server: ServerInfo | None, findings: list[Finding]) -> str:
    """Format the server, its step, and each finding with its advice."""
    lines = [] if server is None else server.lines()
    if server is not None:
        lines += filter(None, (server.step_line(), server.break_even_line()))
    lines += [f"{f.name}: {f.problem}\n    {f.advice}" for f in findings]
    plainly = None if server is None else server.plainly
    if plainly is not None:
        return "\n".join([*lines, plainly])
    if server is not None and server.only_prefills:
        lines.append("a prefill server drafts nothing; ask the decode server about acceptance")
    elif server is not None and server.reports and server.verify_steps < ENOUGH_STEPS:
        lines.append(
            f"too early to judge acceptance: {server.verify_steps} of {ENOUGH_STEPS} steps with "
            "drafts, warm-up included; send more requests"
        )
    return "\n".join(lines if findings else [*lines, "nothing wrong found"])


def read(url: str, timeout_s: float, api_key: str | None = None) -> ServerInfo:
    """Ask the server.

    Args:
        url: as for other clients, with or without a path such as /v1.
        timeout_s: for each answer, in seconds.
        api_key: of a server with --api-key.

    Raises:
        Failed: no server, no answer in time, or not that of an SGLang server.
    """
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    url = f"{base}/server_info"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        answer = requests.get(url, timeout=timeout_s, headers=headers)
    except requests.Timeout as error:
        raise Failed(
            f"{url} gave no answer within {timeout_s:g} s: the scheduler hangs, or is gone"
        ) from error
    except requests.RequestException as error:
        raise Failed(f"{url} cannot be reached: {innermost(error)}") from error
    if answer.status_code in (401, 403):
        raise Failed(f"{url} answers {answer.status_code}; give --api-key")
    try:
        report = answer.json() if answer.ok else None
    except requests.JSONDecodeError:
        report = None
    if not isinstance(report, dict) or "internal_states" not in report:
        raise Failed(f"{url} answers {answer.status_code} and is not that of an SGLang server")
    return ServerInfo(report)


def examine(server: ServerInfo) -> list[Finding]:
    """Return all findings, the most severe first."""
    findings = [*_worker(server), *_outputs(server), *_contained_steps(server), *_settings(server)]
    return [*findings, *_acceptance(server), *_requests(server)]


def _is_adaptive(server: ServerInfo) -> bool:
    """Return whether the server has an adaptive width, which drafts only while that is faster."""
    return "adaptive" in server.values("width")


def _settings(server: ServerInfo) -> Iterator[Finding]:
    """Yield the warnings that the server gave when it started."""
    for warning in server.reports[0].get("warnings", ()) if server.reports else ():
        yield Finding(**warning)


def _worker(server: ServerInfo) -> Iterator[Finding]:
    """Yield findings about the worker that serves."""
    algorithm, reasons = server.algorithm, server.builtin_reasons
    if algorithm != "DFLASH":
        serves = f"--speculative-algorithm {algorithm}" if algorithm else server.worker
        yield Finding(
            "no-dflash",
            f"the server runs {serves}, no DFlash draft",
            "start it with --speculative-algorithm DFLASH --speculative-draft-model-path DRAFT",
        )
    elif not server.reports and reasons:
        yield Finding(
            "builtin-worker",
            f"SGLang's built-in DFLASH worker serves, because of {', '.join(reasons)}",
            "leave that out to get sglang-dflash's worker (docs/limits.md), or keep it: "
            "everything but what this package adds works",
        )
    elif not server.reports:
        yield Finding(
            "builtin-worker",
            "SGLang's built-in DFLASH worker serves, and the plugin of sglang-dflash is not loaded",
            "run `sglang-dflash env` in the server's environment: it tells why",
        )


def _outputs(server: ServerInfo) -> Iterator[Finding]:
    """Yield findings about invalid outputs and drafts."""
    simulated = server.least("simulated_acceptance")
    if simulated is not None:
        yield Finding(
            "simulated-acceptance",
            f"SGLANG_SIMULATE_ACC_LEN commits {simulated:g} tokens per step, right or wrong: "
            "outputs have no meaning",
            "unset that variable, and restart",
        )
    nonfinite = sum(server.values("nonfinite_outputs"))
    if nonfinite:
        yield Finding(
            "nonfinite-outputs",
            f"{nonfinite} outputs of the draft were NaN or Inf; they were never accepted",
            "serve in bfloat16 or float32 if this is float16; otherwise the draft checkpoint is "
            "broken: get it again, or take another",
        )


def _acceptance(server: ServerInfo) -> Iterator[Finding]:
    """Yield a finding about low acceptance: the alarm, or the length since the server's start."""
    if server.least("simulated_acceptance") is not None:
        return
    until_found = (
        "until it is found, let the server draft less (--speculative-dflash-width adaptive) or not "
        "at all (leave out --speculative-algorithm)"
    )
    if _is_adaptive(server):
        until_found = "meanwhile the server drafts rarely (--speculative-dflash-width adaptive)"
    settings = [warning.name for warning in _settings(server)]
    advice = f"see to {' and '.join(settings)} first; otherwise " if settings else ""
    look_for = f"{advice}look for {'; '.join(CAUSES)}; "
    recent = server.least("recent_acceptance_length")
    # Our worker reports its steps, so that too few of them are not judged.
    length = server.acceptance_length
    if server.reports and server.verify_steps < ENOUGH_STEPS:
        length = None
    if any(server.values("acceptance_alarm")) and recent is not None:
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
    elif server.losing is not None:
        yield Finding(
            "drafts-do-not-pay",
            server.losing,
            "start it with --speculative-dflash-width adaptive, which decodes plainly where that "
            f"is faster, or without --speculative-algorithm; or {look_for}compare with "
            "`sglang-dflash bench`",
        )
    elif length is not None and length < 2.0 and not _is_adaptive(server):
        yield Finding(
            "acceptance-below-2",
            f"acceptance length {length:.2f}: plain decoding may be faster; with "
            "`--speculative-dflash-width adaptive` the server decodes without drafts where it is",
            look_for + "compare with `sglang-dflash bench`",
        )


def _contained_steps(server: ServerInfo) -> Iterator[Finding]:
    """Yield findings about failed steps that the server has survived."""
    for state in server.states:
        containment = state.get("containment") or {}
        if containment.get("contained_steps"):
            yield Finding(
                "contained-steps",
                f"{containment['contained_steps']} steps failed and "
                f"{containment['ended_requests']} requests were ended by it; the last error is "
                f"{containment['last_error']}",
                "the log has a traceback of each kind: report it to SGLang, or here if it names "
                "sglang_dflash",
            )


def _requests(server: ServerInfo) -> Iterator[Finding]:
    """Yield findings about requests that the server's settings do not suit."""
    share = server.least("draft_context_share")
    if share is not None and share < LOW_CONTEXT_SHARE:
        yield Finding(
            "draft-kv-too-small",
            f"the draft KV cache held {share:.0%} of the context that drafts were to see",
            "raise --speculative-dflash-draft-kv-tokens (now "
            f"{server.least('draft_kv_entries') or 0:.0f})",
        )
    # With an adaptive width, most steps without drafts are chosen by the width policy.
    undrafted = 0 if _is_adaptive(server) else sum(server.values("undrafted_steps"))
    steps = undrafted + sum(server.values("verify_steps"))
    if undrafted >= ENOUGH_STEPS and undrafted > 0.25 * steps:
        yield Finding(
            "many-undrafted",
            f"{undrafted / steps:.0%} of the decode steps had no drafts: their requests have a "
            "custom logit processor, or a grammar that cannot look ahead",
            "send requests without a processor where none is needed, and leave out "
            "--grammar-backend; such a request takes one token per step",
        )
