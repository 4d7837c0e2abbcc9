"""`sglang-dflash check-gpu`: check our kernels on this machine's GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from sglang_dflash.common.errors import ConfigError, Failed, cut
from sglang_dflash.common.machine import hardware, version
from sglang_dflash.tools.gpu_check import verdict

ISSUES = "a new issue of this project"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", default="gpu-report.json", help="the report (default: %(default)s)")
    add(
        "--only",
        default="",
        metavar="PART",
        help="run the parts whose names begin so, such as check (about a minute) or "
        "check/Qwen3-8B; all take 5 to 20 minutes",
    )
    add("--tiny", action="store_true", help="try the command on the CPU; nothing is judged")
    add("--dry-run", action="store_true", help="print the fewest bytes of each part, run nothing")


def run(args: argparse.Namespace) -> None:
    """Raises Failed if the GPU is rejected, or if a part of --tiny fails. Ends the process with
    status 2 if there is no GPU."""
    try:
        import torch
    except ImportError:
        _end("torch is not installed")
    if not args.tiny and not args.dry_run and not torch.cuda.is_available():
        _end("torch finds no CUDA device here; --tiny tries the command on the CPU")
    from sglang_dflash.tools.gpu_check import plan

    parts = plan.select_parts(args.tiny, args.only)
    if args.dry_run:
        for name, part in parts.items():
            print(json.dumps({name: part.floors or {}}))
        return
    path = Path(args.out)
    report: dict[str, Any] = {
        "command": args.command,
        "sglang_dflash": version("sglang-dflash"),
        "hardware": hardware(),
        "parts": {},
    }
    try:
        path.write_text("")
    except OSError as error:
        required = f"it cannot be written ({cut(str(error))})"
        raise ConfigError("out", args.out, required) from error
    for figures in plan.run(parts):
        report["parts"] = figures
        path.write_text(json.dumps(report, indent=1) + "\n")
    refusal = _try(report) if args.tiny else _judge(report)
    print(f"report: {path} (figures, versions and the names of CPU and GPU; send it with {ISSUES})")
    if refusal:
        sys.stdout.flush()
        raise Failed(f"check-gpu: {refusal}")


def _try(report: dict[str, Any]) -> str:
    """Print that the parts ran. Returns the parts that failed, or an empty string."""
    parts = report["parts"]
    device = report["hardware"]["accelerator"] or "the CPU"
    print(f"tried on {device}: {len(parts)} parts ran; nothing is judged")
    failed = {name: figures["failed"] for name, figures in parts.items() if "failed" in figures}
    return "; ".join(f"{name}: {reason}" for name, reason in failed.items())


def _judge(report: dict[str, Any]) -> str:
    """Print the verdict and its reasons. Returns advice if the GPU is rejected, or an empty
    string."""
    parts, device = report["parts"], report["hardware"]["accelerator"]
    wrong = verdict.find_failures(parts)
    if wrong:
        print(f"REJECT {device}:", *(f"  {line}" for line in wrong), sep="\n")
        return "rejected; serve with --speculative-dflash-worker builtin"
    if any(name.startswith("check/") for name in parts):
        print(
            f"ACCEPT {device}: kernels, attention and recorded steps compute what torch does "
            f"({len(parts)} parts)"
        )
    else:
        print(f"NOT JUDGED {device}: no part compared kernels with torch; --only check does")
    for line in verdict.find_missed_goals(parts):
        print(f"  slower than computed: {line}")
    return ""


def _end(why: str) -> NoReturn:
    print(f"sglang-dflash check-gpu: {why}", file=sys.stderr)
    raise SystemExit(2)
