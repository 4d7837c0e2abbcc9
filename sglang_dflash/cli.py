"""The `sglang-dflash` command."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_dflash.bench.demo_models import demo_pair
from sglang_dflash.config import ConfigError, Options
from sglang_dflash.facts import look_up
from sglang_dflash.inspection import DTYPE_BYTES, GIB, Serving, inspect


class Command(NamedTuple):
    """A sub-command: its help line, what declares its arguments, and what runs it (prints, or raises ConfigError)."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def _demo_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", help="dense")


def _demo_models(args: argparse.Namespace) -> None:
    pair = demo_pair(args.kind)
    print(pair.target.resolve())
    print(pair.draft.resolve())


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    default, dtypes = Serving(), list(DTYPE_BYTES)
    parser.add_argument("target", help="a folder with config.json, or a hub name")
    parser.add_argument("draft", help="a folder with config.json, or a hub name")
    parser.add_argument("--window", type=int, help="committed tokens that the draft attends to (default: all)")
    parser.add_argument("--sinks", type=int, default=Options.sinks, help="first tokens of a request that stay visible beside the window")
    parser.add_argument("--block-size", type=int, help="tokens verified per step (default: the draft's)")
    parser.add_argument("--max-running-requests", type=int, default=default.max_running_requests, help="default: %(default)s")
    parser.add_argument("--draft-kv-tokens", type=int, help="entries of the draft KV cache under a window")
    parser.add_argument("--memory-gib", type=float, default=default.memory_gib, help="device memory, GiB (default: %(default)s)")
    parser.add_argument("--mem-fraction", type=float, default=default.mem_fraction, help="share of it for weights and KV (%(default)s)")
    parser.add_argument("--kv-memory-gib", type=float, help="memory for all KV, GiB, instead of computing it from the weights")
    parser.add_argument("--kv-dtype", choices=dtypes, help="target KV (default: bfloat16)")
    parser.add_argument("--draft-kv-dtype", choices=dtypes, help="draft KV (default: the target's)")
    parser.add_argument("--offline", action="store_true", help="do not ask the hub")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _inspect(args: argparse.Namespace) -> None:
    options = Options(block_size=args.block_size, window=args.window, sinks=args.sinks, draft_kv_tokens=args.draft_kv_tokens)
    serving = Serving(
        max_running_requests=args.max_running_requests,
        memory_gib=args.memory_gib,
        mem_fraction=args.mem_fraction,
        kv_memory_gib=args.kv_memory_gib,
        kv_dtype=args.kv_dtype,
        draft_kv_dtype=args.draft_kv_dtype,
    )
    target, draft = (look_up(kind, getattr(args, kind), offline=args.offline) for kind in ("target", "draft"))
    report = inspect(target, draft, options, serving).report()
    print(json.dumps(report) if args.json else _table(report))


def _table(report: dict[str, Any]) -> str:
    """The report for reading: one aligned line per fact, byte counts also in GiB."""
    facts = [(name, _readable(name, value)) for name, value in report.items() if name != "sources"]
    width = max(len(name) for name, _ in facts)
    indent = " " * (width + 2)
    sources = [textwrap.fill(f"{'source':<{width}}  {text}", 120, subsequent_indent=indent) for text in report["sources"]]
    return "\n".join([f"{name:<{width}}  {text}" for name, text in facts] + sources)


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if "gain" in name:
        return f"{value:.2%}"
    if "bytes" in name and value >= GIB // 1024:
        return f"{value:,} ({value / GIB:.3f} GiB)"
    return f"{value:,}" if isinstance(value, int) else str(value)


COMMANDS = {
    "demo-models": Command(
        "print the directories of an embedded pair: the target's, then the draft's", _demo_models_arguments, _demo_models
    ),
    "inspect": Command("whether a pair can be served and what it will cost, before anything is loaded", _inspect_arguments, _inspect),
}


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; 1 with the reason on stderr where it cannot be done."""
    parser = argparse.ArgumentParser(prog="sglang-dflash", description="DFlash speculative decoding for SGLang")
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.arguments(parsers.add_parser(name, help=command.help))
    args = parser.parse_args(argv)
    try:
        COMMANDS[args.command].run(args)
    except ConfigError as error:
        print(f"sglang-dflash: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
