"""A bounded draft KV cache against one entry per target slot, on chats and branching prompts.

One server after another, greedy, float32. Outputs and cached tokens of every arm are compared with
plain decoding's. One cached token more is the last one of an answer, whose KV a verify step has
already computed. The exit status is 1 if another difference is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.conversations import AT_A_TIME, Answers, branches, chats, texts
from experiments.runner import one_after_another
from sglang_dflash.bench.server import FlagValue, ServerConfig, demo_config
from sglang_dflash.drafting.options import Options as DraftOptions
from sglang_dflash.facts.command_line import setting
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.embedded import DemoPair, demo_pair

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server

WINDOW, TARGET_TOKENS = 512, 32768
WORKLOADS = {"chats": chats, "branches": branches}


@dataclass(frozen=True)
class Options:
    model: str = setting("dense", "which embedded pair (default: {default})")


def arms(pair: DemoPair) -> dict[str, ServerConfig]:
    """`plain` comes first."""
    sizes: dict[str, FlagValue] = {
        "--max-total-tokens": TARGET_TOKENS,
        "--max-running-requests": AT_A_TIME,
    }
    resolved = DraftOptions(window=WINDOW).resolve(DraftConfig.from_pretrained(pair.draft))
    tenth = resolved.draft_kv_entries(AT_A_TIME) // 10
    entries = "--speculative-dflash-draft-kv-tokens"
    default = demo_config(pair, dflash=True).with_flags(
        {**sizes, "--speculative-draft-window-size": WINDOW}
    )
    return {
        "plain": demo_config(pair, dflash=False).with_flags(sizes),
        "unbounded": default.with_flags({entries: 2 * TARGET_TOKENS}),
        "default": default,
        "tenth": default.with_flags({entries: tenth}),
    }


def run(options: Options) -> dict[str, Any]:
    pair = demo_pair(options.model)
    pieces = texts(pair)

    def answer_all(server: Server) -> tuple[dict[str, Answers], dict[str, Any]]:
        answers = {name: ask_all(server, pieces) for name, ask_all in WORKLOADS.items()}
        return answers, server.dflash()

    measured = one_after_another(arms(pair), answer_all)
    plain, _ = measured.pop("plain")
    return {
        "window": WINDOW,
        "max_running_requests": AT_A_TIME,
        "arms": {
            name: compare(answers, plain, worker) for name, (answers, worker) in measured.items()
        },
    }


def compare(
    answers: dict[str, Answers], plain: dict[str, Answers], worker: dict[str, Any]
) -> dict[str, Any]:
    keys = ("draft_kv_entries", "draft_kv_bytes", "draft_kv_live_share")
    row: dict[str, Any] = {key: worker.get(key) for key in keys}
    for name, got in answers.items():
        more = {a - b for a, b in zip(got.cached, plain[name].cached, strict=True)}
        row[name] = {
            "identical": got.outputs == plain[name].outputs,
            "cached_tokens": sum(got.cached),
            "cached_tokens_over_plain": sorted(more),
            "acceptance_length": round(got.acceptance_length, 4),
        }
    return row


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"{'arm':20}{'entries':>8}" + "".join(f"{name:>10}" for name in WORKLOADS)]
    for name, row in result["arms"].items():
        lengths = "".join(f"{row[one]['acceptance_length']:10.4f}" for one in WORKLOADS)
        lines.append(f"{name:20}{row['draft_kv_entries']:8}{lengths}")
    return lines


def failure(result: dict[str, Any]) -> str | None:
    for name, row in result["arms"].items():
        for one in WORKLOADS:
            if not row[one]["identical"]:
                return f"arm {name}, {one}: outputs are not plain decoding's"
            if not set(row[one]["cached_tokens_over_plain"]) <= {0, 1}:
                return f"arm {name}, {one}: other cached tokens than plain decoding"
    return None
