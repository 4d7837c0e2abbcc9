"""What SGLang's wait for free request slots costs and saves under our worker: time to first token and throughput.

    python -m benchmarks.admission [--rounds 4] [--out benchmarks/results/admission_cpu.json]

Two servers of ours: `wait` as SGLang sets it up (a DFLASH server admits new requests only when several slots are free), and `off`,
with --min-free-slots-delay 1. Twice as many clients as request slots, each sending its next request when its last is answered.
The rounds take turns; the server that waits sleeps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.managers.min_free_slots_delayer import resolve_min_free_slots

from sglang_dflash.bench import measure
from sglang_dflash.bench.demo import server_args
from sglang_dflash.bench.load import Answer, SGLang
from sglang_dflash.bench.report import percentile
from sglang_dflash.bench.server import Server, together
from sglang_dflash.checkpoint.embedded import demo_pair

SLOTS, REQUESTS = 16, 64


class Load(NamedTuple):
    """One round: output tokens per second, and every request's time to first token in seconds."""

    tokens_per_second: float
    first_token_s: list[float]


def load(server: Server, prompts: list[str]) -> Load:
    """`REQUESTS` greedy requests of 16 to 96 new tokens from `2 * SLOTS` clients."""
    endpoint = SGLang(server.url)

    def one(i: int) -> Answer:
        # A first word of its own: nothing is found cached.
        return endpoint.ask(f"{i} {prompts[i % len(prompts)]}", 16 + 16 * (i % 6), ignore_eos=True)

    if not endpoint.flush():
        raise RuntimeError("the prefix cache could not be emptied")
    began = time.perf_counter()
    with ThreadPoolExecutor(2 * SLOTS) as pool:
        answers = list(pool.map(one, range(REQUESTS)))
    seconds = time.perf_counter() - began
    return Load(
        sum(answer.tokens for answer in answers) / seconds,
        [answer.first_token_s for answer in answers],
    )


def summed_up(rounds: list[Load]) -> dict[str, float]:
    firsts = [first for one in rounds for first in one.first_token_s]
    return {
        "tokens_per_second": round(statistics.median(one.tokens_per_second for one in rounds), 2),
        "first_token_s_median": round(statistics.median(firsts), 3),
        "first_token_s_p95": round(percentile(firsts, 0.95), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = demo_pair("dense")
    slots = resolve_min_free_slots(None, SLOTS, is_dflash_family=True)
    flags = [*server_args(pair, dflash=True), "--max-running-requests", str(SLOTS)]
    servers = {"off": Server([*flags, "--min-free-slots-delay", "1"]), "wait": Server(flags)}
    rounds: dict[str, list[Load]] = {name: [] for name in servers}
    with together(servers.values()):
        for server in servers.values():
            load(server, pair.prompts)
        for i in range(args.rounds):
            for name in sorted(servers, reverse=bool(i % 2)):
                rounds[name].append(load(servers[name], pair.prompts))
                print(name, summed_up(rounds[name][-1:]), flush=True)
    throughput = [
        a.tokens_per_second / b.tokens_per_second
        for a, b in zip(rounds["off"], rounds["wait"], strict=True)
    ]
    firsts = [
        statistics.median(a.first_token_s) / statistics.median(b.first_token_s)
        for a, b in zip(*rounds.values(), strict=True)
    ]
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.admission --rounds {args.rounds}",
        "hardware": measure.hardware(),
        "max_running_requests": SLOTS,
        "min_free_slots": slots,
        **{name: summed_up(runs) for name, runs in rounds.items()},
        "throughput_ratio": round(statistics.median(throughput), 4),
        "first_token_ratio": round(statistics.median(firsts), 4),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
