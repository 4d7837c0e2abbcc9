"""The cost of a ring's size, on the `smollm2` pair, whose draft layers all slide.

Compares an entry per target slot with rings of 1, 1.25 and 2 times the entries that running
requests can see (the default is one request more). First, functions are continued, 1, 8 and 16 at a
time, without a common prefix: every ring must accept as many tokens as an entry per slot, position
by position. Then sessions pause and return, as agents do: twice as many as run at a time, in a new
order every turn, so that a turn finds its history in the prefix cache after other sessions have
written to the ring. A turn brings a long text, such as a tool's result, or a short one, with which
most of the window is history. Servers run one after another in float32; sampling is greedy.
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
# New tokens of an answer: to a function, before the first pause, and after a pause.
NEW_TOKENS, FIRST, RETURNED = 48, 8, 64
LEVELS = (1, 8, 16)
# Tokens of a text.
PIECE = 300
# Entries that running requests can see or are about to commit.
SEEN = RUNNING * (512 + 8)
# More entries than the target's pool has slots, which makes an entry per slot.
PER_SLOT = "per slot"
ENTRIES = {PER_SLOT: 100_000, "2 x": 2 * SEEN, "1.25 x": SEEN * 5 // 4, "1 x": SEEN}
# The least and the most tokens that a turn brings.
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
    """Measure one server. Returns its outputs and figures."""
    tokenizer = AutoTokenizer.from_pretrained(demo_pair(KIND).target)
    functions = "\n\n".join(prompt.turns[0] for prompt in stdlib_functions())
    ids = tokenizer(functions)["input_ids"]
    texts = [ids[at : at + PIECE] for at in range(0, len(ids) - PIECE, PIECE)]

    def ask(prompts: list[list[int]], at_a_time: int, tokens: int) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(at_a_time) as pool:
            how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            return list(pool.map(lambda ids: server.generate(ids, **how), prompts))

    # All prompts begin with other tokens, so no prefix is shared.
    apart = [
        answer
        for level in LEVELS
        for answer in ask(
            [[level, i, *texts[i % len(texts)]] for i in range(RUNNING)], level, NEW_TOKENS
        )
    ]
    by_position = server.dflash()["acceptance_by_position"]
    by_length = returns(ask, texts, options)
    report = server.dflash()
    return {
        "entries": report["draft_kv_entries"],
        "draft_kv_bytes": report["draft_kv_bytes"],
        "acceptance_length": length_of(apart),
        "acceptance_by_position": by_position,
        "returns_acceptance_length": {length: length_of(by_length[length]) for length in by_length},
        "returns_cached_tokens": sum(
            answer["meta_info"]["cached_tokens"] for answer in chain(*by_length.values())
        ),
        "context_share": report["draft_context_share"],
        "outputs": [answer["output_ids"] for answer in (*apart, *chain(*by_length.values()))],
    }


def returns(ask: Any, texts: list[list[int]], options: Options) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of sessions after a pause, by the length of the turn's text."""
    rng = random.Random(0)
    answers_by_length: dict[str, list[dict[str, Any]]] = {length: [] for length in RETURNS}
    histories = [[200 + i] for i in range(options.chats)]
    for turn, length in enumerate(("long", *islice(cycle(RETURNS), options.turns))):
        order = rng.sample(range(options.chats), options.chats)
        for i in order:
            histories[i] += texts[(i + 7 * turn) % len(texts)][: rng.randint(*RETURNS[length])]
        tokens = RETURNED if turn else FIRST
        answers = ask([list(histories[i]) for i in order], RUNNING, tokens)
        for i, answer in zip(order, answers, strict=True):
            histories[i] += answer["output_ids"]
        answers_by_length[length] += answers if turn else []
    return answers_by_length


def length_of(answers: list[dict[str, Any]]) -> float:
    """Return the acceptance length of answers; 0 in plain decoding."""
    infos = (answer["meta_info"] for answer in answers)
    steps = (of_answer(i.get("spec_verify_ct") or 0, i["completion_tokens"]) for i in infos)
    return round(sum(steps, VerifySteps()).acceptance_length or 0.0, 4)


def run(options: Options) -> dict[str, Any]:
    rings = one_after_another(arms(), lambda server: serve(server, options))
    outputs = rings[PER_SLOT]["outputs"]
    for ring in rings.values():
        ring["identical"] = ring.pop("outputs") == outputs
    return {"chats": options.chats, "turns": options.turns, "rings": rings}


def table(result: dict[str, Any]) -> list[str]:
    columns = "".join(f"{length + ' returns':>16}" for length in RETURNS)
    lines = [f"{'entries':20}{'acceptance':>12}{columns}{'context found':>16}"]
    for name, ring in result["rings"].items():
        share = "all" if ring["context_share"] is None else f"{ring['context_share']:.1%}"
        lengths = "".join(
            f"{ring['returns_acceptance_length'][length]:16.4f}" for length in RETURNS
        )
        lines.append(
            f"{name + ', ' + str(ring['entries']):20}{ring['acceptance_length']:12.4f}"
            f"{lengths}{share:>16}"
        )
    return lines


def failure(result: dict[str, Any]) -> str | None:
    rings = result["rings"]
    different = [name for name, ring in rings.items() if not ring["identical"]]
    if different:
        return f"other outputs: {', '.join(different)}"
    accepted = {name: ring["acceptance_by_position"] for name, ring in rings.items()}
    same = all(by_position == accepted[PER_SLOT] for by_position in accepted.values())
    return None if same else f"other acceptance without prefixes: {accepted}"
