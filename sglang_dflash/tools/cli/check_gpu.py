"""`sglang-dflash check-gpu`: whether our kernels may be trusted on this machine's GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from sglang_dflash.common.errors import ConfigError, Failed, cut
from sglang_dflash.drafting.machine import hardware, version

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


def run(args: argparse.Namespace) -> None:
    """Raises Failed if the GPU is rejected. Ends the process with status 2 if there is none."""
    try:
        import torch
    except ImportError:
        _end("torch is not installed")
    if not args.tiny and not torch.cuda.is_available():
        _end("torch finds no CUDA device here; --tiny tries the command on the CPU")
    from sglang_dflash.tools.gpu_check import plan, verdict

    path = Path(args.out)
    report: dict[str, Any] = {
        "sglang_dflash": version("sglang-dflash"),
        "hardware": hardware(),
        "parts": {},
    }
    try:
        path.write_text("")
    except OSError as error:
        required = f"it cannot be written ({cut(str(error))})"
        raise ConfigError("out", args.out, required) from error
    for so_far in plan.run(plan.Options(tiny=args.tiny, only=args.only)):
        report["parts"] = so_far["parts"]
        path.write_text(json.dumps(report, indent=1) + "\n")
    wrong, missed = verdict.wrong(report["parts"]), verdict.missed(report["parts"])
    print("\n".join(_lines(report, wrong, missed, args.tiny)))
    print(f"report: {path} (figures, versions and the names of CPU and GPU; send it with {ISSUES})")
    if wrong and not args.tiny:
        sys.stdout.flush()
        raise Failed("check-gpu: rejected; serve with --speculative-dflash-worker builtin")


def _lines(report: dict[str, Any], wrong: list[str], missed: list[str], tiny: bool) -> list[str]:
    """The verdict, and what it rests on."""
    device = report["hardware"]["accelerator"] or "the CPU"
    count = len(report["parts"])
    if tiny:
        return [f"tried on {device}: {count} parts ran; nothing is judged"]
    if wrong:
        return [f"REJECT {device}:", *(f"  {line}" for line in wrong)]
    lines = [
        f"ACCEPT {device}: kernels, attention and recorded steps compute what torch does "
        f"({count} parts)"
    ]
    return lines + [f"  slower than computed: {line}" for line in missed]


def _end(why: str) -> NoReturn:
    print(f"sglang-dflash check-gpu: {why}", file=sys.stderr)
    raise SystemExit(2)
