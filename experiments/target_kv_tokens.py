"""KV tokens that remain for the target at equal memory, by the size of the draft's K/V.

Compares no draft, our bounded draft KV, a draft entry per target token, and SGLang's built-in
worker, by the reports of servers that run one after another.
"""

from __future__ import annotations

from typing import Any

from experiments.runner import NoOptions as Options
from experiments.runner import one_after_another
from sglang_dflash.tools.bench.server import FlagValue, ServerConfig, demo_config
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

WINDOW, RUNNING, MEMORY_FRACTION = 512, 16, 0.2


def arms() -> dict[str, ServerConfig]:
    pair = demo_pair("dense")
    window: dict[str, FlagValue] = {"--speculative-draft-window-size": WINDOW}
    draft = sized_by_memory(demo_config(pair, dflash=True))
    return {
        "plain": sized_by_memory(demo_config(pair, dflash=False)),
        "bounded": draft.with_flags(window),
        "per_target_token": draft,
        "builtin": draft.with_flags({**window, "--speculative-dflash-worker": "builtin"}),
    }


def sized_by_memory(config: ServerConfig) -> ServerConfig:
    """The same server with a KV pool as large as the memory allows."""
    return config.without_flags("--max-total-tokens").with_flags(
        {"--mem-fraction-static": MEMORY_FRACTION, "--max-running-requests": RUNNING}
    )


def run(options: Options) -> dict[str, Any]:
    tokens = one_after_another(arms(), lambda server: server.info()["max_total_num_tokens"])
    return {
        "window": WINDOW,
        "max_running_requests": RUNNING,
        "mem_fraction_static": MEMORY_FRACTION,
        "target_kv_tokens": tokens,
        "share_of_plain": {
            name: round(count / tokens["plain"], 4) for name, count in tokens.items()
        },
    }


def table(result: dict[str, Any]) -> list[str]:
    return [
        f"{name:18}{count:10,}{result['share_of_plain'][name]:8.4f}"
        for name, count in result["target_kv_tokens"].items()
    ]
