"""KV tokens that the target gets at equal memory: no draft at all, our bounded draft KV, one draft slot per target token.

    python -m benchmarks.target_kv_tokens [--out benchmarks/results/target_kv_tokens_cpu.json]

The servers' own reports, one server after another. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import requests

from sglang_dflash.bench import measure
from sglang_dflash.bench.demo import server_args
from sglang_dflash.bench.server import Server
from sglang_dflash.checkpoint.embedded import demo_pair

WINDOW, RUNNING, MEMORY_FRACTION = 512, 16, 0.2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = demo_pair("dense")
    window = ["--speculative-draft-window-size", str(WINDOW)]
    arms = {
        "plain": None,
        "bounded": window,
        "per_target_token": [],
        "builtin": [*window, "--speculative-dflash-worker", "builtin"],
    }
    tokens = {}
    for name, flags in arms.items():
        common = server_args(pair, dflash=flags is not None)
        # The memory decides, and nothing else.
        cap = common.index("--max-total-tokens")
        common[cap : cap + 2] = [
            "--mem-fraction-static",
            str(MEMORY_FRACTION),
            "--max-running-requests",
            str(RUNNING),
        ]
        with Server([*common, *(flags or [])]) as server:
            tokens[name] = requests.get(f"{server.url}/server_info", timeout=60).json()[
                "max_total_num_tokens"
            ]
        print(name, tokens[name], flush=True)
    result: dict[str, Any] = {
        "command": "python -m benchmarks.target_kv_tokens",
        "hardware": measure.hardware(),
        "window": WINDOW,
        "max_running_requests": RUNNING,
        "mem_fraction_static": MEMORY_FRACTION,
        "target_kv_tokens": tokens,
        "share_of_plain": {
            name: round(count / tokens["plain"], 4) for name, count in tokens.items()
        },
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
