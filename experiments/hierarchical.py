"""Sessions whose history comes back from host memory, because the pool holds few of them.

Multi-turn chats, then agents that share a list of tools; sessions take turns in a new order every
time. Three servers, one after another, in float32, greedy: plain decoding and DFLASH with a small
pool and a hierarchical cache, and DFLASH with a pool for all histories. Outputs must be equal. At
least half of a pair's cached tokens must come from the host (the agents' list of tools stays on the
device). The acceptance length must be within 3 % of the large pool's. About as many tokens must be
cached; a few requests that start or end in another step make a difference.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from experiments.draft_kv import length_of
from experiments.runner import one_after_another
from sglang_dflash.common.command_line import setting
from sglang_dflash.tools.bench.datasets import stdlib_functions
from sglang_dflash.tools.bench.load import chunks
from sglang_dflash.tools.bench.server import Server, ServerConfig, demo_config
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

AT_A_TIME, NEW_TOKENS, PIECE = 4, 48, 160
AGENTS, TURNS, SHARED_TURNS = 16, 5, 2
TOLERANCE, SHARE, CACHED = 0.03, 0.5, 0.99
PLAIN, HOST, LARGE = "plain decoding", "DFLASH", "DFLASH, a large pool"


@dataclass(frozen=True)
class Options:
    pairs: str = setting("dense,hybrid", "demo pairs, with commas (default: {default})")
    sessions: int = setting(16, "sessions of each kind (default: {default})")
    turns: int = setting(4, "turns of each (default: {default})")
    pool: int = setting(2500, "tokens of the small pool (default: {default})")


def arms(pair: str, options: Options) -> dict[str, ServerConfig]:
    flags = {"--max-running-requests": AT_A_TIME, "--max-total-tokens": options.pool}
    hierarchical = {"--enable-hierarchical-cache": True, "--hicache-ratio": 20}
    plain = demo_config(demo_pair(pair), dflash=False).with_flags(flags)
    dflash = demo_config(demo_pair(pair), dflash=True).with_flags(flags)
    return {
        PLAIN: plain.with_flags(hierarchical),
        HOST: dflash.with_flags(hierarchical),
        LARGE: dflash.with_flags({"--max-total-tokens": 20 * options.pool}),
    }


def sessions(pair: str, options: Options) -> dict[str, list[list[str]]]:
    """Return the texts of every turn of all sessions, by traffic: "chats" and "agents"."""
    pieces, rng = demo_pair(pair).prompts, random.Random(0)
    chats = [
        [f"# chat {i}\n{pieces[i % len(pieces)]}"]
        + [pieces[(i + 7 * turn) % len(pieces)] for turn in range(1, options.turns)]
        for i in range(options.sessions)
    ]
    every = agents([prompt.turns[0] for prompt in stdlib_functions()])[: options.sessions]
    rng.shuffle(every)
    return {"chats": chats, "agents": [agent[: options.turns] for agent in every]}


def agents(functions: Sequence[str]) -> list[list[str]]:
    """Return the turns of agents' sessions. The text of a turn is a tool's result.

    All sessions begin with the same list of tools. Pairs of sessions share their first turns.

    Args:
        functions: source texts that serve as results; at least `TURNS`.
    """
    rng = random.Random(0)
    tools = [{"tool": name, "arguments": ["path"]} for name in ("read", "search", "edit", "run")]
    header = "# tools\n" + "".join(f"{json.dumps(tool)}\n" for tool in tools)

    def results(count: int) -> list[str]:
        return [f"\n# result of read\n{text}" for text in rng.sample(functions, count)]

    turns_of_agents = []
    for _ in range(AGENTS // 2):
        trunk = results(SHARED_TURNS)
        for _ in range(2):
            first_turn, *later_turns = trunk + results(TURNS - SHARED_TURNS)
            turns_of_agents.append([header + first_turn, *later_turns])
    return turns_of_agents


def serve(server: Server, pair: str, options: Options) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(demo_pair(pair).target)
    summaries = {}
    for traffic, texts in sessions(pair, options).items():
        ids = [[tokenizer(text)["input_ids"][:PIECE] for text in turns] for turns in texts]
        summaries[traffic] = _summary(*_converse(server, ids))
    return summaries


def _converse(server: Server, texts: list[list[list[int]]]) -> tuple[list[dict[str, Any]], float]:
    """Run all sessions. Returns their answers and the seconds that they took."""
    rng, answers = random.Random(1), list[dict[str, Any]]()
    histories: list[list[int]] = [[] for _ in texts]
    began = time.perf_counter()
    for turn in range(max(map(len, texts))):
        order = rng.sample(range(len(texts)), len(texts))
        for i in order:
            histories[i] = histories[i] + texts[i][turn]
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            replies = list(pool.map(lambda ids: _ask(server, ids), [histories[i] for i in order]))
        for i, answer in zip(order, replies, strict=True):
            histories[i] = histories[i] + answer["output_ids"]
        answers += replies
    return answers, time.perf_counter() - began


def _ask(server: Server, ids: list[int]) -> dict[str, Any]:
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    began, first_token_s, last_chunk = time.perf_counter(), 0.0, dict[str, Any]()
    for chunk in chunks(f"{server.url}/generate", body):
        first_token_s, last_chunk = first_token_s or time.perf_counter() - began, chunk
    return {**last_chunk, "first_token_s": first_token_s}


def _summary(answers: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    infos = [answer["meta_info"] for answer in answers]
    details = [info.get("cached_tokens_details") or {} for info in infos]
    cached = sum(info["cached_tokens"] for info in infos)
    firsts = sorted(answer["first_token_s"] for answer in answers)
    return {
        "outputs": [answer["output_ids"] for answer in answers],
        "prompt_tokens": sum(info["prompt_tokens"] for info in infos),
        "cached_tokens": cached,
        "from_host": round(sum(detail.get("host", 0) for detail in details) / max(cached, 1), 4),
        "acceptance_length": length_of(answers),
        "first_token_ms": round(1000 * firsts[len(firsts) // 2]),
        "output_tok_s": round(len(answers) * NEW_TOKENS / seconds, 1),
    }


def run(options: Options) -> dict[str, Any]:
    rows = []
    for pair in options.pairs.split(","):
        by_arm = one_after_another(
            arms(pair, options), lambda server, pair=pair: serve(server, pair, options)
        )
        expected = {traffic: summary["outputs"] for traffic, summary in by_arm[PLAIN].items()}
        for arm, summaries in by_arm.items():
            for traffic, summary in summaries.items():
                same = summary.pop("outputs") == expected[traffic]
                rows.append(
                    {"pair": pair, "traffic": traffic, "server": arm, "identical": same, **summary}
                )
    return {"pool": options.pool, "rows": rows}


def table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{'pair, traffic':16}{'server':24}{'cached':>8}{'from host':>11}{'acceptance':>12}"
        f"{'first token, ms':>17}{'tok/s':>8}"
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['pair'] + ', ' + row['traffic']:16}{row['server']:24}{row['cached_tokens']:8}"
            f"{row['from_host']:11.1%}{row['acceptance_length']:12.4f}{row['first_token_ms']:17}"
            f"{row['output_tok_s']:8.1f}"
        )
    return lines


def failure(result: dict[str, Any]) -> str | None:
    rows = {(row["pair"], row["traffic"], row["server"]): row for row in result["rows"]}
    problems = [
        f"other outputs: {', '.join(key)}" for key, row in rows.items() if not row["identical"]
    ]
    for (pair, traffic, server), row in rows.items():
        if server != HOST:
            continue
        large = rows[pair, traffic, LARGE]
        of_pair = [host_row for key, host_row in rows.items() if (key[0], key[2]) == (pair, HOST)]
        loaded = sum(host_row["from_host"] * host_row["cached_tokens"] for host_row in of_pair)
        if loaded < SHARE * sum(host_row["cached_tokens"] for host_row in of_pair):
            problems.append(f"{pair}: {loaded:.0f} cached tokens came from the host")
        if row["cached_tokens"] < CACHED * large["cached_tokens"]:
            problems.append(f"{pair}, {traffic}: {row['cached_tokens']} tokens cached")
        if row["acceptance_length"] < (1 - TOLERANCE) * large["acceptance_length"]:
            problems.append(f"{pair}, {traffic}: accepts {row['acceptance_length']}")
    return "; ".join(problems) or None
