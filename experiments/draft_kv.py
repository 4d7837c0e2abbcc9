"""What the size of a ring costs, on the `smollm2` pair, whose draft layers all slide.

With an entry per target slot, and with rings of one and two times (the default) what running
requests can see. First functions to continue, 1, 8 and 16 at a time, without a prefix in common:
every ring of the default size or more must accept what the entries per slot do, position by
position. Then multi-turn chats, 16 at a time, in a new order every turn, so that a turn finds its
history in the prefix cache after other chats have written to the ring. Servers in float32, one
after another; greedy.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from experiments.runner import one_after_another
from sglang_dflash.bench.datasets import stdlib_functions
from sglang_dflash.bench.server import Server, ServerConfig, demo_config
from sglang_dflash.drafting.acceptance_length import VerifySteps, of_answer
from sglang_dflash.facts.command_line import setting
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.public_target import KIND

RUNNING, NEW_TOKENS = 16, 48
LEVELS = (1, 8, 16)
# Tokens of a text.
PIECE = 300
# What running requests can see, or are about to commit.
SEEN = RUNNING * (512 + 8)
# More entries than the target's pool has slots: one per slot.
PER_SLOT, DEFAULT = "per slot", "2 x"
ENTRIES = {PER_SLOT: 100_000, DEFAULT: 2 * SEEN, "1 x": SEEN}


@dataclass(frozen=True)
class Options:
    chats: int = setting(32, "conversations (default: {default})")
    turns: int = setting(4, "turns of each (default: {default})")


def arms() -> dict[str, ServerConfig]:
    config = demo_config(demo_pair(KIND), dflash=True).with_flags(
        {"--max-total-tokens": 32768, "--max-running-requests": RUNNING}
    )
    flag = "--speculative-dflash-draft-kv-tokens"
    return {
        name: config.with_flags({} if name == DEFAULT else {flag: entries})
        for name, entries in ENTRIES.items()
    }


def serve(server: Server, options: Options) -> dict[str, Any]:
    """Of one server: outputs, and what they took."""
    tokenizer = AutoTokenizer.from_pretrained(demo_pair(KIND).target)
    functions = "\n\n".join(prompt.turns[0] for prompt in stdlib_functions())
    ids = tokenizer(functions)["input_ids"]
    texts = [ids[at : at + PIECE] for at in range(0, len(ids) - PIECE, PIECE)]

    def ask(prompts: list[list[int]], at_a_time: int) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(at_a_time) as pool:
            how = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            return list(pool.map(lambda ids: server.generate(ids, **how), prompts))

    # Other first tokens: no prefix is found.
    apart = [
        answer
        for level in LEVELS
        for answer in ask([[level, i, *texts[i % len(texts)]] for i in range(RUNNING)], level)
    ]
    by_position = server.dflash()["acceptance_by_position"]
    chats = chat(ask, texts, options)
    shown = server.dflash()
    return {
        "entries": shown["draft_kv_entries"],
        "draft_kv_bytes": shown["draft_kv_bytes"],
        "acceptance_length": length_of(apart),
        "acceptance_by_position": by_position,
        "chats_acceptance_length": length_of(chats),
        "chats_cached_tokens": sum(answer["meta_info"]["cached_tokens"] for answer in chats),
        "context_share": shown["draft_context_share"],
        "outputs": [answer["output_ids"] for answer in (*apart, *chats)],
    }


def chat(ask: Any, texts: list[list[int]], options: Options) -> list[dict[str, Any]]:
    """Conversations, whose every turn continues the whole history."""
    rng, found = random.Random(0), []
    histories = [[200 + i] for i in range(options.chats)]
    for turn in range(options.turns):
        order = rng.sample(range(options.chats), options.chats)
        for i in order:
            histories[i] += texts[(i + 7 * turn) % len(texts)][: rng.randint(100, 300)]
        answers = ask([list(histories[i]) for i in order], RUNNING)
        for i, answer in zip(order, answers, strict=True):
            histories[i] += answer["output_ids"]
        found += answers
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
    lines = [f"{'entries':20}{'acceptance':>12}{'in chats':>12}{'context found':>16}"]
    for name, of in result["rings"].items():
        share = "all" if of["context_share"] is None else f"{of['context_share']:.1%}"
        lines.append(
            f"{name + ', ' + str(of['entries']):20}{of['acceptance_length']:12.4f}"
            f"{of['chats_acceptance_length']:12.4f}{share:>16}"
        )
    return lines


def failure(result: dict[str, Any]) -> str | None:
    rings = result["rings"]
    other = [name for name, of in rings.items() if not of["identical"]]
    if other:
        return f"other outputs: {', '.join(other)}"
    kept = [rings[name]["acceptance_by_position"] for name in (PER_SLOT, DEFAULT)]
    return None if kept[0] == kept[1] else f"other acceptance without prefixes: {kept}"
