"""What replay leaves to the target of the memory that snapshots take: KV tokens, or requests.

The embedded hybrid pair at 16 verified tokens per step and a draft window. The servers' own
reports, one server after another: once with a given number of recurrent states, once with as many
requests as the memory allows.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from experiments.runner import Arms, Experiment, NoOptions, Progress, one_after_another
from sglang_dflash.bench.server_config import FlagValue, ServerConfig, demo_config
from sglang_dflash.facts.embedded import demo_pair

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server

BLOCK_SIZE, WINDOW, MEMORY_FRACTION = 16, 256, 0.2
SCENARIOS: dict[str, dict[str, FlagValue]] = {
    "states_given": {"--max-running-requests": 64, "--max-mamba-cache-size": 512},
    "most_requests": {"--max-running-requests": 4096},
}
ROLLBACKS = ("replay", "snapshot")


def arms(_: NoOptions) -> Arms:
    """All scenarios, `SCENARIO/ARM` each."""
    return {
        f"{scenario}/{arm}": server(arm).with_flags(limits)
        for scenario, limits in SCENARIOS.items()
        for arm in ("plain", *ROLLBACKS)
    }


def server(arm: str) -> ServerConfig:
    """A demo server with pools as large as the memory allows."""
    config = demo_config(demo_pair("hybrid"), dflash=arm in ROLLBACKS)
    config = config.without_flags(
        "--max-total-tokens", "--max-mamba-cache-size", "--max-running-requests"
    ).with_flags({"--mem-fraction-static": MEMORY_FRACTION})
    if arm not in ROLLBACKS:
        return config
    return config.with_flags(
        {
            "--speculative-num-draft-tokens": BLOCK_SIZE,
            "--speculative-draft-window-size": WINDOW,
            "--speculative-dflash-recurrent-rollback": arm,
        }
    )


def workload(arms: Arms, _: NoOptions, progress: Progress) -> dict[str, dict[str, Any]]:
    return one_after_another(arms, lambda _, server: pools(server), progress)


def pools(server: Server) -> dict[str, Any]:
    """Sizes that the server reports once it has verified a block."""
    server.generate("def f(", temperature=0, max_new_tokens=4)
    info, worker = server.info(), server.dflash()
    states = re.search(r"max_mamba_cache_size: (\d+)", server.log.read_text(errors="replace"))
    running = info["internal_states"][0]["effective_max_running_requests_per_dp"]
    scratch = worker.get("recurrent_scratch_bytes")
    return {
        "target_kv_tokens": info["max_total_num_tokens"],
        "recurrent_states": int(states[1]) if states else None,
        "running_requests": running,
        "scratch_bytes_per_request": None if scratch is None else scratch // (running + 1),
    }


def report(pools: dict[str, dict[str, Any]], _: NoOptions) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {scenario: {} for scenario in SCENARIOS}
    for name, sizes in pools.items():
        scenario, arm = name.split("/")
        found[scenario][arm] = sizes
    replay, snapshot = (
        found["states_given"][arm]["scratch_bytes_per_request"] for arm in ROLLBACKS
    )
    return {
        "block_size": BLOCK_SIZE,
        "mem_fraction_static": MEMORY_FRACTION,
        "window": WINDOW,
        **found,
        "scratch_ratio": round(replay / snapshot, 4),
    }


def table(result: dict[str, Any]) -> list[str]:
    columns = list(result["states_given"]["plain"])
    lines = [f"{'scenario':15}{'arm':10}" + "".join(f"{name:>27}" for name in columns)]
    for scenario in SCENARIOS:
        for arm, sizes in result[scenario].items():
            cells = "".join(f"{sizes[name]!s:>27}" for name in columns)
            lines.append(f"{scenario:15}{arm:10}{cells}")
    return lines


EXPERIMENT = Experiment(
    name="recurrent_memory",
    description=__doc__,
    arms=arms,
    workload=workload,
    report=report,
    table=table,
)
