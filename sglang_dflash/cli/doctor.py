"""`sglang-dflash doctor`."""

from __future__ import annotations

import argparse
import json
import sys

from sglang_dflash.cli.command import Failed
from sglang_dflash.doctor.findings import Finding, examine
from sglang_dflash.doctor.reading import NotReadable, read


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", help="the server, such as http://127.0.0.1:30000")
    add("--timeout", type=float, default=30, metavar="S", help="seconds (default: %(default)s)")
    add("--api-key", help="of a server that asks for one")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Raises Failed, which makes the exit status 1, if anything is wrong."""
    try:
        findings = examine(read(args.url, args.timeout, args.api_key))
    except NotReadable as error:
        advice = "check the URL, and the server's log and process (docs/operating.md)"
        findings = [Finding("not-reachable", str(error), advice)]
    if args.json:
        print(json.dumps({"url": args.url, "findings": [f._asdict() for f in findings]}))
    else:
        print(as_text(findings))
    if findings:
        sys.stdout.flush()
        raise Failed(f"doctor: {len(findings)} finding{'s'[: len(findings) > 1]}")


def as_text(findings: list[Finding]) -> str:
    """One line per finding, and what to do below it."""
    if not findings:
        return "nothing wrong found"
    return "\n".join(f"{f.name}: {f.problem}\n    {f.advice}" for f in findings)
