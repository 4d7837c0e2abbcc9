"""The cost of a ring's size, on the `smollm2` pair, whose draft layers all slide.

With an entry per target slot, and with rings of 1, 1.25 and 2 times what running requests can see
(the default is for one request more). First functions to continue, 1, 8 and 16 at a time, without a
prefix in common: every ring must accept what the entries per slot do, position by position. Then
sessions that pause and return, as agents' do: twice as many as run at a time, in a new order every
turn, so that a turn finds its history in the prefix cache after other sessions have written to the
ring. A turn brings a long text, as a tool's result, or a short one, which leaves most of the window
to what was written before. Servers in float32, one after another; greedy.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

from transformers import AutoTokenizer

from experiments.runner import one_after_another
from sglang_dflash.common.command_line import setting
from sglang_dflash.drafting.acceptance_length import VerifySteps, of_answer
from sglang_dflash.tools.bench.datasets import stdlib_functions
from sglang_dflash.tools.bench.server import Server, ServerConfig, demo_config
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from sglang_dflash.tools.demo_pairs.public_target import KIND

RUNNING = 16
# Of an answer: to the functions, before a pause, and after it.
NEW_TOKENS, FIRST, RETURNED = 48, 8, 64
LEVELS = (1, 8, 16)
# Tokens of a text.
PIECE = 300
# What running requests can see, or are about to commit.
SEEN = RUNNING * (512 + 8)
# More entries than the target's pool has slots: one per slot.
PER_SLOT = "per slot"
ENTRIES = {PER_SLOT: 100_000, "2 x": 2 * SEEN, "1.25 x": SEEN * 5 // 4, "1 x": SEEN}
# Tokens that a turn brings, from and up to.
RETURNS = {"long": (100, 300), "short": (8, 40)}


@dataclass(frozen=True)
class Options:
    chats: int = setting(32, "sessions (default: {default})")
    turns: int = setting(4, "returns of each (default: {default})")


def arms() -> dict[str, ServerConfig]:
    config = demo_config(demo_pair(KIND), dflash=True).with_flags(
        {"--max-total-tokens": 32768, "--max-running-requests": RUNNING}
    )
    flag = "--speculative-dflash-draft-kv-tokens"
    return {name: config.with_flags({flag: entries}) for name, entries in ENTRIES.items()}


def serve(server: Server, options: Options) -> dict[str, Any]:
    """Return the outputs of one server, and what they took."""
    tokenizer = AutoTokenizer.from_pretrained(demo_pair(KIND).target)
    functions = "\n\n".join(prompt.turns[0] for prompt in stdlib_functions())
    ids = tokenizer(functions)["input_ids"]
    texts = [ids[at : at + PIECE] for at in range(0, len(ids) - PIECE, PIECE)]

    def ask(prompts: list[list[int]], at_a_time: int, tokens: int) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(at_a_time) as pool:
            how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            return list(pool.map(lambda ids: server.generate(ids, **how), prompts))

    # Other first tokens: no prefix is found.
    apart = [
        answer
        for level in LEVELS
        for answer in ask(
            [[level, i, *texts[i % len(texts)]] for i in range(RUNNING)], level, NEW_TOKENS
        )
    ]
    by_position = server.dflash()["acceptance_by_position"]
    found = returns(ask, texts, options)
    shown = server.dflash()
    return {
        "entries": shown["draft_kv_entries"],
        "draft_kv_bytes": shown["draft_kv_bytes"],
        "acceptance_length": length_of(apart),
        "acceptance_by_position": by_position,
        "returns_acceptance_length": {kind: length_of(found[kind]) for kind in found},
        "returns_cached_tokens": sum(
            answer["meta_info"]["cached_tokens"] for answer in chain(*found.values())
        ),
        "context_share": shown["draft_context_share"],
        "outputs": [answer["output_ids"] for answer in (*apart, *chain(*found.values()))],
    }


def returns(ask: Any, texts: list[list[int]], options: Options) -> dict[str, list[dict[str, Any]]]:
    """Answers of sessions after a pause, by what the turn brings: one more turn of the history."""
    rng = random.Random(0)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in RETURNS}
    histories = [[200 + i] for i in range(options.chats)]
    for turn, kind in enumerate(("long", *islice(cycle(RETURNS), options.turns))):
        order = rng.sample(range(options.chats), options.chats)
        for i in order:
            histories[i] += texts[(i + 7 * turn) % len(texts)][: rng.randint(*RETURNS[kind])]
        tokens = RETURNED if turn else FIRST
        answers = ask([list(histories[i]) for i in order], RUNNING, tokens)
        for i, answer in zip(order, answers, strict=True):
            histories[i] += answer["output_ids"]
        found[kind] += answers if turn else []
    return found


def length_of(answers: list[dict[str, Any]]) -> float:
    """Their acceptance length, 0 in plain decoding."""
    infos = (answer["meta_info"] for answer in answers)
    steps = (of_answer(i.get("spec_verify_ct") or 0, i["completion_tokens"]) for i in infos)
    return round(sum(steps, VerifySteps()).acceptance_length or 0.0, 4)


def run(options: Options) -> dict[str, Any]:
    found = one_after_another(arms(), lambda server: serve(server, options))
    outputs = found[PER_SLOT]["outputs"]
    for of in found.values():
        of["identical"] = of.pop("outputs") == outputs
    return {"chats": options.chats, "turns": options.turns, "rings": found}


def table(result: dict[str, Any]) -> list[str]:
    columns = "".join(f"{kind + ' returns':>16}" for kind in RETURNS)
    lines = [f"{'entries':20}{'acceptance':>12}{columns}{'context found':>16}"]
    for name, of in result["rings"].items():
        share = "all" if of["context_share"] is None else f"{of['context_share']:.1%}"
        lengths = "".join(f"{of['returns_acceptance_length'][kind]:16.4f}" for kind in RETURNS)
        lines.append(
            f"{name + ', ' + str(of['entries']):20}{of['acceptance_length']:12.4f}"
            f"{lengths}{share:>16}"
        )
    return lines


def failure(result: dict[str, Any]) -> str | None:
    rings = result["rings"]
    other = [name for name, of in rings.items() if not of["identical"]]
    if other:
        return f"other outputs: {', '.join(other)}"
    kept = {name: of["acceptance_by_position"] for name, of in rings.items()}
    same = all(each == kept[PER_SLOT] for each in kept.values())
    return None if same else f"other acceptance without prefixes: {kept}"
