"""`sglang-dflash doctor`."""

from __future__ import annotations

import argparse
import json
import sys

from sglang_dflash.cli import Failed
from sglang_dflash.doctor import ENOUGH_STEPS, Finding, NotReadable, examine, read


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
