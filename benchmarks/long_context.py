"""What a long context costs the drafter under a window: step time at 16k tokens over 1k, and prefill over plain decoding's.

    python -m benchmarks.long_context [--repetitions 30] [--prefills 5] [--out benchmarks/results/long_context_cpu.json]

The step time is the worker's own account of propose and commit (all that is not the target's forward). Both parts take turns
within one run; the server that waits sleeps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
import typing
from pathlib import Path
from typing import Any

from sglang_dflash.bench import measure
from sglang_dflash.bench.demo import server_args
from sglang_dflash.bench.server import Server, together
from sglang_dflash.checkpoint.embedded import DemoPair, demo_pair

WINDOW, SHORT, LONG, NEW_TOKENS = 512, 1024, 16384, 32


def long_text(pair: DemoPair, tokens: int) -> list[int]:
    """Token ids of standard-library source; beyond the length that the demo target was trained on (448), so its outputs mean little."""
    from transformers import AutoTokenizer

    sources = "".join(inspect.getsource(module) for module in (argparse, typing, inspect))
    ids = AutoTokenizer.from_pretrained(pair.target)(sources)["input_ids"]
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, {tokens} are needed")
    return ids[:tokens]


def draft_side_seconds(server: Server, prompt: list[int]) -> float:
    """Mean time of propose and commit per decode step while one request is answered."""
    before = server.dflash()
    server.generate(prompt, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    after = server.dflash()
    steps = after["decode_steps"] - before["decode_steps"]
    return (
        sum(
            after["host_seconds"][p] - before["host_seconds"].get(p, 0.0)
            for p in ("propose", "commit")
        )
        / steps
    )


def prefill_seconds(server: Server, prompt: list[int]) -> float:
    began = time.perf_counter()
    server.generate(prompt, temperature=0, max_new_tokens=1, ignore_eos=True)
    return time.perf_counter() - began


def compare_steps(server: Server, ids: list[int], repetitions: int) -> dict[str, Any]:
    prompts = {"short": ids[:SHORT], "long": ids}
    for prompt in prompts.values():
        draft_side_seconds(server, prompt)
    times: dict[str, list[float]] = {name: [] for name in prompts}
    for i in range(repetitions):
        for name in sorted(prompts, reverse=bool(i % 2)):
            times[name].append(draft_side_seconds(server, prompts[name]))
    ratios = [a / b for a, b in zip(times["long"], times["short"], strict=True)]
    medians = {
        f"{name}_ms": round(1000 * statistics.median(values), 4) for name, values in times.items()
    }
    return {**medians, "ratio": round(statistics.median(ratios), 4), "repetitions": repetitions}


def compare_prefills(plain: Server, dflash: Server, ids: list[int], rounds: int) -> dict[str, Any]:
    servers = {"plain": plain, "dflash": dflash}
    times: dict[str, list[float]] = {name: [] for name in servers}
    for i in range(rounds):
        # Another first token each time: nothing is found cached.
        prompt = [100 + i, *ids[1:]]
        for name in sorted(servers, reverse=bool(i % 2)):
            times[name].append(prefill_seconds(servers[name], prompt))
        print({name: round(values[-1], 3) for name, values in times.items()}, flush=True)
    ratios = [a / b for a, b in zip(times["dflash"], times["plain"], strict=True)]
    medians = {f"{name}_s": round(statistics.median(values), 4) for name, values in times.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 4), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--prefills", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = demo_pair("dense")
    ids, flags = long_text(pair, LONG), {}
    for dflash in (False, True):
        flags[dflash] = server_args(pair, dflash)
        flags[dflash][flags[dflash].index("--max-total-tokens") + 1] = str(4 * LONG)
    plain, ours = (
        Server(flags[False]),
        Server([*flags[True], "--speculative-draft-window-size", str(WINDOW)]),
    )
    with together((plain, ours)):
        result: dict[str, Any] = {
            "command": f"python -m benchmarks.long_context --repetitions {args.repetitions} --prefills {args.prefills}",
            "hardware": measure.hardware(),
            "window": WINDOW,
            "short": SHORT,
            "long": LONG,
            "prefill": compare_prefills(plain, ours, ids, args.prefills),
            "draft_side_step": compare_steps(ours, ids, args.repetitions),
        }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
