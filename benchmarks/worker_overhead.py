"""Our worker against SGLang's built-in one, or replay against snapshots: same platform, same pair, same prompts, taking turns.

    python -m benchmarks.worker_overhead [--rounds 5] [--out benchmarks/results/worker_overhead.json]
    python -m benchmarks.worker_overhead --model hybrid --against snapshot

Both servers run at once and the one that waits sleeps. The last line is one JSON object with everything.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from sglang_dflash.bench import measure
from sglang_dflash.bench.demo import server_args
from sglang_dflash.bench.server import Server, together
from sglang_dflash.checkpoint.embedded import demo_pair

NEW_TOKENS = 96
AGAINST = {
    "builtin": ["--speculative-dflash-worker", "builtin"],
    "snapshot": ["--speculative-dflash-recurrent-rollback", "snapshot"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dense")
    parser.add_argument("--against", choices=AGAINST, default="builtin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = demo_pair(args.model)
    flags = server_args(pair, dflash=True)
    arms = {"ours": Server(flags), args.against: Server([*flags, *AGAINST[args.against]])}
    asked = f"--model {args.model} --against {args.against} --rounds {args.rounds}"
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.worker_overhead {asked}",
        "hardware": measure.hardware(),
        "new_tokens": NEW_TOKENS,
    }
    with together(arms.values()):
        for concurrency in (1, 8):
            result[f"concurrency_{concurrency}"] = compare(
                arms, pair.prompts[: max(4, 2 * concurrency)], concurrency, args.rounds
            )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def compare(
    arms: dict[str, Server], prompts: list[str], concurrency: int, rounds: int
) -> dict[str, Any]:
    """Median step time and throughput per arm, and the median of the round-by-round ratios (ours / the other)."""
    runs: dict[str, list[measure.Run]] = {name: [] for name in arms}
    for i in range(rounds + 1):
        for name in list(arms) if i % 2 else list(arms)[::-1]:
            done = measure.run(arms[name], prompts, concurrency, NEW_TOKENS)
            # The first round warms up.
            if i:
                runs[name].append(done)
    pairs = list(zip(*runs.values(), strict=True))
    assert all(a.outputs == b.outputs for a, b in pairs), (
        "the two servers' outputs differ: no figure without exactness"
    )
    table: dict[str, Any] = {
        name: {
            "step_ms": round(statistics.median(r.step_ms for r in many), 3),
            "tokens_per_second": round(statistics.median(r.tokens_per_second for r in many), 2),
            "tokens_per_step": round(
                sum(r.tokens for r in many) / sum(r.verify_steps for r in many), 3
            ),
        }
        for name, many in runs.items()
    }
    table["step_time_ratio"] = round(statistics.median(a.step_ms / b.step_ms for a, b in pairs), 4)
    table["throughput_ratio"] = round(
        statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs), 4
    )
    return table


if __name__ == "__main__":
    main()
