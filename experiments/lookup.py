"""Drafts, or what the text has held before: tokens per step of each rule, by replay, on a CPU.

A text is replayed on the `smollm2` pair: at every position the draft proposes a block, and the
newest tokens are looked up in the text before. A rule decides which of the two a step verifies; a
step commits its drafts up to the first that differs from the text, and the text's next token. So
all rules see the same text, and nothing has to be served.

Texts: the target's greedy answers to the built-in `chat` prompts, its answers to them at
temperature 1 (`sampled`), its greedy answers to each file of --prompts (`python -m experiments
prompts` writes some), and, given, characters that repeat nothing (`random`). Of all but the
sampled ones also with better drafts: each token is right with that chance.
"""

from __future__ import annotations

import random
import statistics
import string
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments import recorded
from sglang_dflash.common.command_line import setting
from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.draft_source import DraftSource
from sglang_dflash.drafting.lookup import SHORTEST_MATCH, seen_before
from sglang_dflash.drafting.options import Options as DraftOptions
from sglang_dflash.tools.bench import datasets
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from sglang_dflash.tools.demo_pairs.public_target import KIND
from sglang_dflash.tools.transformers_loop import LoadedPair, load
from sglang_dflash.tools.transformers_loop.generation import _drafter
from sglang_dflash.tools.transformers_loop.target_cache import captured_hidden

TOKENS, BATCH = 160, 32
WIDEST, CONTEXT = 32, 32000
# Chances that each token of a better draft is right, and of a draft beside recorded turns: 0.5 is
# that of ours on chats.
BETTER = (0.75, 0.9)
RECORDED = (0.5, 0.75, 0.9)
RECORDED_BLOCK = 8
SAMPLED = "sampled"


@dataclass(frozen=True)
class Options:
    texts: int = setting(8, "texts of each kind (default {default})")
    prompts: str = setting("", "a folder of prompt files, each of which is a kind of text")
    recorded: str = setting(
        "", "replay lookup on this JSON file of recorded agent turns, without a model"
    )


class Position(NamedTuple):
    """A step that begins there.

    Attributes:
        rest: the tokens that follow in the text.
        drafts: the draft's.
        match: newest tokens that stood in the text before.
        seen: what followed them.
    """

    rest: list[int]
    drafts: list[int]
    match: int
    seen: list[int]


Rule = Callable[[Position], list[int]]


def accepted(proposal: list[int], rest: list[int]) -> int:
    """Tokens that agree, from the first on."""
    agree = (a == b for a, b in zip(proposal, rest, strict=False))
    return next((i for i, same in enumerate(agree) if not same), min(len(proposal), len(rest)))


def padded(tokens: list[int], count: int) -> list[int]:
    """The first `count` tokens, and none after the last one."""
    return (tokens + [-1] * count)[:count]


def seen_from(least: int) -> Rule:
    """Lookup at a match of `least` tokens, else the draft."""
    return lambda at: at.seen[: len(at.drafts)] if at.match >= least else at.drafts


def agreed(long: int) -> Rule:
    """And at a match of 2 tokens, if the draft begins with the same one."""

    def rule(at: Position) -> list[int]:
        taken = at.match >= long or (at.match >= 2 and at.seen[:1] == at.drafts[:1])
        return at.seen[: len(at.drafts)] if taken else at.drafts

    return rule


def learned(width: int | None = None) -> Rule:
    """The server's, for one request at a time: `DraftSource`, from its first step on."""
    source = DraftSource(width or WIDEST, torch.device("cpu"))

    def rule(at: Position) -> list[int]:
        count = len(at.drafts) if width is None else width - 1
        drafts, seen = (
            torch.tensor([padded(at.drafts, count)]),
            torch.tensor([padded(at.seen, count)]),
        )
        match = torch.tensor([at.match])
        classes = source.classes(match, drafts, seen)
        proposal = (seen if source.looks_up(classes, count) else drafts)[0].tolist()
        right = accepted(proposal, at.rest)
        # At a text's end the target's own tokens are not known.
        tokens = torch.tensor([padded(at.rest, count + 1)])
        outcome = Accepted(torch.tensor([right + 1]), tokens, drafts)
        source.learn(classes, torch.stack((drafts, seen)), outcome)
        return proposal

    return rule


def best(at: Position) -> list[int]:
    return max(at.drafts, at.seen[: len(at.drafts)], key=lambda some: accepted(some, at.rest))


RULES: dict[str, Callable[[], Rule]] = {
    "draft": lambda: lambda at: at.drafts,
    "lookup": lambda: lambda at: at.seen[: len(at.drafts)] if at.match >= 3 else [],
    **{f"match {n}": partial(seen_from, n) for n in (2, 3, 4, 8)},
    **{f"match {n}, or 2 and 1 agrees": partial(agreed, n) for n in (3, 4)},
    "learned": learned,
    "best of both": lambda: best,
    **{f"learned, width {w}": partial(learned, w) for w in (16, 32)},
}


def tasks(folder: str) -> dict[str, list[Prompt]]:
    """Prompts by kind of text."""
    chats = datasets.from_file(datasets.CHAT)
    files = sorted(Path(folder).glob("*.jsonl")) if folder else []
    return {"chat": chats, SAMPLED: chats} | {file.stem: datasets.from_file(file) for file in files}


def noise(tokenizer: Any, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Letters, digits and marks, drawn evenly: prompts, and texts after them."""
    rng = random.Random(0)
    letters = string.ascii_letters + string.digits + string.punctuation + " \n"
    for _ in range(count):
        ids = tokenizer("".join(rng.choices(letters, k=600)))["input_ids"]
        yield ids[:-TOKENS], ids[-TOKENS:]


@torch.inference_mode()
def replay(
    pair: LoadedPair, prompt: list[int], answer: list[int] | None, greedy: bool
) -> list[Position]:
    """Every position of a text at which a step can begin."""
    if answer is None:
        torch.manual_seed(0)
        how = (
            {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        )
        ids = torch.tensor([prompt])
        written = pair.target.generate(ids, pad_token_id=0, max_new_tokens=TOKENS, **how)
        answer = written[0, len(prompt) :].tolist()
    text = torch.tensor(prompt + answer)
    with captured_hidden(pair.target, pair.draft.config.target_layer_ids) as hidden:
        pair.target(text[None])
        states = hidden()
    total, options = len(text), DraftOptions().resolve(pair.draft.config)
    slots = torch.arange(total + options.verify_block)
    drafter = _drafter(pair.draft, pair.target, options, len(slots), torch.device("cpu"))
    drafter.absorb(states, slots[:total], slots[:total])
    found = []
    for at in torch.arange(len(prompt), total - 1).split(BATCH):
        rows = torch.zeros_like(at)
        drafts = drafter.propose(text[at], RequestSlots(slots[None].int(), rows, at, total))[:, 1:]
        known = RequestSlots(text[None].int(), rows, at, total - 1)
        match, seen = seen_before(text[at], known.req_to_token, known, WIDEST - 1)
        parts: list[Tensor] = [drafts, match, seen]
        for i, *three in zip(at.tolist(), *(part.tolist() for part in parts), strict=True):
            found.append(Position(text[i + 1 :].tolist(), *three))
    return found


def tokens_per_step(positions: list[Position], rule: Rule) -> float:
    at, steps = 0, 0
    while at < len(positions):
        at += accepted(rule(positions[at]), positions[at].rest) + 1
        steps += 1
    return len(positions) / steps


def better_draft(replays: list[list[Position]], chance: float) -> list[list[Position]]:
    """The same positions with drafts that are right with that chance in each place."""
    rng = random.Random(0)

    def drafts(at: Position) -> list[int]:
        tokens = padded(at.rest, len(at.drafts))
        return [token if rng.random() < chance else -1 for token in tokens]

    return [[at._replace(drafts=drafts(at)) for at in positions] for positions in replays]


def recorded_positions(text: recorded.Text, chance: float) -> list[Position]:
    """Every position of a recorded answer, and simulated drafts that are right with that chance."""
    positions = []
    for at in range(text.begin + 1, len(text.ids)):
        rest = text.ids[at : at + WIDEST].tolist()
        match = text.match(at)[0]
        # A server does not take a shorter one.
        match = match if match >= SHORTEST_MATCH else 0
        seen = padded(text.followers(at, WIDEST - 1) if match else [], WIDEST - 1)
        positions.append(Position(rest, [-1] * (RECORDED_BLOCK - 1), match, seen))
    return better_draft([positions], chance)[0]


def replay_recorded(file: Path) -> dict[str, Any]:
    """Tokens per step of lookup alone, and of a server's choice beside simulated drafts."""
    cases = recorded.texts_of(recorded.read(file))
    beside: dict[str, dict[str, float]] = {}
    for chance in RECORDED:
        replays = [recorded_positions(text, chance) for text in cases]
        beside[str(chance)] = by_rule(replays, ("draft", "learned", "best of both"))
    return {**recorded.run(cases), "beside_a_draft": beside}


def by_rule(
    replays: list[list[Position]], names: Collection[str] = tuple(RULES)
) -> dict[str, float]:
    """Tokens per step of all texts together."""
    tokens = sum(map(len, replays))
    steps = dict.fromkeys(names, 0.0)
    for name in names:
        rule = RULES[name]()
        for positions in replays:
            steps[name] += len(positions) / tokens_per_step(positions, rule)
    return {name: round(tokens / taken, 3) for name, taken in steps.items()}


def lookup_ms(block: int) -> float:
    """Milliseconds of a lookup in a text of `CONTEXT` tokens that hold anything; a median."""
    text = torch.randint(2000, (1, CONTEXT + block), dtype=torch.int32)
    newest, row, length = text[:, -block].long(), torch.tensor([0]), torch.tensor([CONTEXT])
    times = []
    for _ in range(12):
        began = time.perf_counter()
        seen_before(newest, text, RequestSlots(text, row, length, CONTEXT), block - 1)
        times.append(time.perf_counter() - began)
    return round(1000 * statistics.median(times[2:]), 3)


def run(options: Options) -> dict[str, Any]:
    if options.recorded:
        return replay_recorded(Path(options.recorded))
    named = demo_pair(KIND)
    pair = load(str(named.target), str(named.draft))
    rows = {}
    for kind, prompts in tasks(options.prompts).items():
        chosen = datasets.select(prompts, options.texts, seed=0)
        ids = [datasets.encode_turn(pair.tokenizer, prompt, [], None) for prompt in chosen]
        replays = [replay(pair, one, None, kind != SAMPLED) for one in ids]
        rows[kind] = by_rule(replays)
        if kind != SAMPLED:
            rows |= {f"{kind} {p}": by_rule(better_draft(replays, p)) for p in BETTER}
    given = noise(pair.tokenizer, options.texts)
    rows["random"] = by_rule([replay(pair, *texts, greedy=True) for texts in given])
    block = pair.draft.config.block_size
    sizes = {"block_size": block, "tokens": TOKENS, "context": CONTEXT}
    return {**sizes, "lookup_ms": lookup_ms(block), "rows": rows}


def table(result: dict[str, Any]) -> list[str]:
    if "cases" in result:
        return recorded.table(result)
    kinds = list(result["rows"])
    lines = [f"{'tokens per step':32}" + "".join(f"{kind:>15}" for kind in kinds)]
    lines.append(f"lookup in {result['context']} tokens takes {result['lookup_ms']} ms")
    return lines + [
        f"{rule:32}" + "".join(f"{result['rows'][kind][rule]:15.2f}" for kind in kinds)
        for rule in RULES
    ]
