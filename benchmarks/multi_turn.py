"""A bounded draft KV cache against one slot per target token, on chats and on prompts that branch.

    python -m benchmarks.multi_turn [--out benchmarks/results/multi_turn.json]

One server after another, greedy, float32. Outputs and cached tokens of every arm are compared with plain decoding's; one cached
token more is the last one of an answer, whose KV a verify step has already computed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.conversations import AT_A_TIME, Answers, branches, chats, texts
from sglang_dflash.bench import measure
from sglang_dflash.bench.demo import server_args
from sglang_dflash.bench.server import Server
from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.checkpoint.embedded import DemoPair, demo_pair
from sglang_dflash.core.options import Options

WINDOW, TARGET_TOKENS = 512, 32768


def arms(pair: DemoPair) -> dict[str, list[str]]:
    """Flags of every arm beside the common ones; `plain` comes first."""
    default = (
        Options(window=WINDOW)
        .resolve(DraftConfig.from_pretrained(pair.draft))
        .draft_kv_slots(AT_A_TIME)
    )
    window = ["--speculative-draft-window-size", str(WINDOW)]
    entries, again = (
        "--speculative-dflash-draft-kv-tokens",
        ["--speculative-dflash-recompute-tail", str(WINDOW)],
    )
    return {
        "plain": [],
        "unbounded": [*window, entries, str(2 * TARGET_TOKENS)],
        "default": window,
        "default, recompute": [*window, *again],
        "tenth": [*window, entries, str(default // 10)],
        "tenth, recompute": [*window, entries, str(default // 10), *again],
    }


def run_arm(
    pair: DemoPair, name: str, flags: list[str]
) -> tuple[dict[str, Answers], dict[str, Any]]:
    """All workloads on a fresh server, and the worker's report after them."""
    common = server_args(pair, dflash=name != "plain")
    common[common.index("--max-total-tokens") + 1] = str(TARGET_TOKENS)
    with Server([*common, "--max-running-requests", str(AT_A_TIME), *flags]) as server:
        pieces = texts(pair)
        return {
            "chats": chats(server, pieces),
            "branches": branches(server, pieces),
        }, server.dflash()


def summed_up(
    answers: dict[str, Answers], plain: dict[str, Answers], report: dict[str, Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        key: report.get(key) for key in ("draft_kv_slots", "draft_kv_bytes", "draft_kv_live_share")
    }
    for name, got in answers.items():
        row[name] = {
            "identical": got.outputs == plain[name].outputs,
            "cached_tokens": sum(got.cached),
            "cached_tokens_over_plain": sorted(
                {a - b for a, b in zip(got.cached, plain[name].cached, strict=True)}
            ),
            "acceptance_length": round(got.acceptance_length, 4),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = demo_pair("dense")
    result: dict[str, Any] = {
        "command": "python -m benchmarks.multi_turn",
        "hardware": measure.hardware(),
        "window": WINDOW,
        "max_running_requests": AT_A_TIME,
        "arms": {},
    }
    plain: dict[str, Answers] = {}
    for name, flags in arms(pair).items():
        answers, report = run_arm(pair, name, flags)
        if name == "plain":
            plain = answers
            continue
        result["arms"][name] = summed_up(answers, plain, report)
        print(f"{name:20}", json.dumps(result["arms"][name]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    rows = [row[workload] for row in result["arms"].values() for workload in plain]
    sys.exit(
        0
        if all(row["identical"] and set(row["cached_tokens_over_plain"]) <= {0, 1} for row in rows)
        else 1
    )


if __name__ == "__main__":
    main()
