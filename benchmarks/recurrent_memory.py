"""What replay leaves to the target that snapshots take, at equal memory: KV tokens, or running requests.

    python -m benchmarks.recurrent_memory [--out benchmarks/results/recurrent_memory_cpu.json]

The embedded hybrid pair at 16 verified tokens per step and a draft window; the servers' own reports, one server after another, once
with the number of states given and once with as many requests as find room. The last line is one JSON object.
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
from sglang_dflash.bench.server import Server
from sglang_dflash.checkpoint.embedded import demo_pair

BLOCK_SIZE, WINDOW, MEMORY_FRACTION = 16, 256, 0.2
SCENARIOS = {
    "states_given": ["--max-running-requests", "64", "--max-mamba-cache-size", "512"],
    "most_requests": ["--max-running-requests", "4096"],
}


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = demo_pair("hybrid")
    found: dict[str, dict[str, Any]] = {name: {} for name in SCENARIOS}
    for scenario, limits in SCENARIOS.items():
        for arm in ("plain", "replay", "snapshot"):
            flags = [*sized_by_memory(server_args(pair, dflash=arm != "plain")), *limits]
            if arm != "plain":
                flags += [
                    "--speculative-num-draft-tokens",
                    str(BLOCK_SIZE),
                    "--speculative-draft-window-size",
                    str(WINDOW),
                ]
                flags += ["--speculative-dflash-recurrent-rollback", arm]
            with Server(flags) as server:
                found[scenario][arm] = started_with(server)
            print(scenario, arm, found[scenario][arm], flush=True)
    scratch = {
        arm: found["states_given"][arm]["scratch_bytes_per_request"]
        for arm in ("replay", "snapshot")
    }
    result: dict[str, Any] = {
        "command": "python -m benchmarks.recurrent_memory",
        "hardware": measure.hardware(),
        "block_size": BLOCK_SIZE,
        "mem_fraction_static": MEMORY_FRACTION,
        "window": WINDOW,
        **found,
        "scratch_ratio": round(scratch["replay"] / scratch["snapshot"], 4),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
