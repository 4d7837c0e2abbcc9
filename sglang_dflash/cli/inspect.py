"""`sglang-dflash inspect`."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from sglang_dflash.drafting.options import Options
from sglang_dflash.facts.published import look_up
from sglang_dflash.facts.sizes import KV_DTYPES
from sglang_dflash.inspect.findings import Serving, inspect
from sglang_dflash.inspect.text import as_json, as_table


def arguments(parser: argparse.ArgumentParser) -> None:
    default, dtypes = Serving(), list(KV_DTYPES)
    add = parser.add_argument
    add("target", help="a folder with config.json, or a hub name")
    add("draft", help="a folder with config.json, or a hub name")
    add("--window", type=int, help="committed tokens that the draft attends to (default: all)")
    add(
        "--sinks",
        type=int,
        default=Options.sinks,
        help="first tokens of a request that stay visible beside the window",
    )
    add("--block-size", type=int, help="tokens verified per step (default: the draft's)")
    add(
        "--max-running-requests",
        type=int,
        default=default.max_running_requests,
        help="default: %(default)s",
    )
    add("--draft-kv-tokens", type=int, help="entries of the draft KV cache under a window")
    add(
        "--memory-gib",
        type=float,
        default=default.memory_gib,
        help="device memory, GiB (default: %(default)s)",
    )
    add(
        "--mem-fraction",
        type=float,
        default=default.mem_fraction,
        help="fraction of it for weights and KV (default: %(default)s)",
    )
    add(
        "--kv-memory-gib",
        type=float,
        help="memory for both KV pools, GiB (default: computed from the weights)",
    )
    add("--kv-dtype", choices=dtypes, help="target KV (default: bfloat16)")
    add("--draft-kv-dtype", choices=dtypes, help="draft KV (default: the target's)")
    add("--offline", action="store_true", help="do not ask the hub")
    add("--sources", action="store_true", help="also print where the facts were read")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    options = Options(
        block_size=args.block_size,
        window=args.window,
        sinks=args.sinks,
        draft_kv_tokens=args.draft_kv_tokens,
    )
    serving = Serving(**{field.name: getattr(args, field.name) for field in fields(Serving)})
    target, draft = (
        look_up(kind, getattr(args, kind), offline=args.offline) for kind in ("target", "draft")
    )
    names = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(Options)}
    found = inspect(target, draft, options, serving, names)
    print(json.dumps(as_json(found)) if args.json else as_table(found, sources=args.sources))
