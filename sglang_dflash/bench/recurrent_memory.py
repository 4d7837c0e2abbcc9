"""What replay leaves to the target that snapshots take, at equal memory: KV tokens, states, and running requests.

    python -m sglang_dflash.bench.recurrent_memory [--out benchmarks/results/recurrent_memory_cpu.json]

The embedded hybrid pair at 16 verified tokens per step; the servers' own reports, one server after another. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import requests

from sglang_dflash.bench import measure
from sglang_dflash.bench.demo import server_args
from sglang_dflash.bench.demo_models import demo_pair
from sglang_dflash.bench.server import Server

BLOCK_SIZE, MEMORY_FRACTION = 16, 0.2


def sized_by_memory(args: list[str]) -> list[str]:
    """A demo server's flags with its pools as large as the memory allows."""
    for flag in ("--max-total-tokens", "--max-mamba-cache-size", "--max-running-requests"):
        at = args.index(flag)
        args = args[:at] + args[at + 2 :]
    return [*args, "--mem-fraction-static", str(MEMORY_FRACTION)]


def started_with(server: Server) -> dict[str, Any]:
    """What the server says of itself once it has verified a block."""
    server.generate("def f(", temperature=0, max_new_tokens=4)
    info, report = requests.get(f"{server.url}/server_info", timeout=60).json(), server.dflash()
    states = re.search(r"max_mamba_cache_size: (\d+)", server.log.read_text(errors="replace"))
    running = info["internal_states"][0]["effective_max_running_requests_per_dp"]
    scratch = report.get("recurrent_scratch_bytes")
    return {
        "target_kv_tokens": info["max_total_num_tokens"],
        "recurrent_states": int(states[1]) if states else None,
        "running_requests": running,
        "scratch_bytes_per_request": None if scratch is None else scratch // (running + 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = demo_pair("hybrid")
    arms: dict[str, Any] = {}
    for name in ("plain", "replay", "snapshot"):
        flags = sized_by_memory(server_args(pair, dflash=name != "plain"))
        if name != "plain":
            flags += ["--speculative-num-draft-tokens", str(BLOCK_SIZE), "--speculative-dflash-recurrent-rollback", name]
        with Server(flags) as server:
            arms[name] = started_with(server)
        print(name, arms[name], flush=True)
    result: dict[str, Any] = {
        "command": "python -m sglang_dflash.bench.recurrent_memory",
        "hardware": measure.hardware(),
        "block_size": BLOCK_SIZE,
        "mem_fraction_static": MEMORY_FRACTION,
        "arms": arms,
        "scratch_ratio": round(arms["replay"]["scratch_bytes_per_request"] / arms["snapshot"]["scratch_bytes_per_request"], 4),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
