"""KV tokens that the target gets at equal memory, by what the draft's K/V takes.

Without a draft, with a window, with one draft slot per target token, and with SGLang's built-in
worker; and of the code pair, whose draft layers all slide, without a draft and without a flag. The
servers' own reports, one server after another, each on a machine that seems to have 16 GiB, all of
them free: what other processes take would change the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.runner import NoOptions as Options
from experiments.runner import one_after_another
from sglang_dflash.bench.server import FlagValue, ServerConfig, demo_config
from sglang_dflash.facts.embedded import demo_pair

WINDOW, RUNNING, MEMORY_FRACTION = 512, 16, 0.2


def arms() -> dict[str, ServerConfig]:
    pair, sliding = demo_pair("dense"), demo_pair("code")
    window: dict[str, FlagValue] = {"--speculative-draft-window-size": WINDOW}
    draft = sized_by_memory(demo_config(pair, dflash=True))
    return {
        "plain": sized_by_memory(demo_config(pair, dflash=False)),
        "bounded": draft.with_flags(window),
        "per_target_token": draft,
        "builtin": draft.with_flags({**window, "--speculative-dflash-worker": "builtin"}),
        "code_plain": sized_by_memory(demo_config(sliding, dflash=False)),
        "code_sliding": sized_by_memory(demo_config(sliding, dflash=True)),
    }


def sized_by_memory(config: ServerConfig) -> ServerConfig:
    """The same server with a KV pool as large as the memory allows."""
    sized = config.without_flags("--max-total-tokens").with_flags(
        {"--mem-fraction-static": MEMORY_FRACTION, "--max-running-requests": RUNNING}
    )
    env = {**config.env, "CHANGED": "sized"}
    return replace(sized, module="tests.engine.changed_server", env=env)


def run(options: Options) -> dict[str, Any]:
    tokens = one_after_another(arms(), lambda server: server.info()["max_total_num_tokens"])
    return {
        "window": WINDOW,
        "max_running_requests": RUNNING,
        "mem_fraction_static": MEMORY_FRACTION,
        "target_kv_tokens": tokens,
        "share_of_plain": {
            name: round(count / tokens["code_plain" if "code" in name else "plain"], 4)
            for name, count in tokens.items()
        },
    }


def table(result: dict[str, Any]) -> list[str]:
    return [
        f"{name:18}{count:10,}{result['share_of_plain'][name]:8.4f}"
        for name, count in result["target_kv_tokens"].items()
    ]
