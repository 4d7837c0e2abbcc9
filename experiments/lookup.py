"""Drafts or lookup in the text: tokens per step with each rule, by replay, on a CPU.

A text is replayed on the `smollm2` pair. At every position the draft proposes a block, and the
newest tokens are looked up in the text before. A rule chooses the proposal that a step verifies.
The step commits its tokens up to the first one that differs from the text, and the text's next
token. All rules thus see the same text, and no server is needed.

Texts: the target's greedy answers to the built-in `chat` prompts, its answers to them at
temperature 1 (`sampled`), its greedy answers to each file of --prompts (`python -m experiments
prompts` writes some), and random characters (`random`). All texts but the sampled and random ones
are also replayed with better drafts, whose tokens are right with a given probability.
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
from sglang_dflash.drafting import draft_source
from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.draft_source import DraftsBySource, DraftSource
from sglang_dflash.drafting.noise import likeliest
from sglang_dflash.drafting.options import Options as DraftOptions
from sglang_dflash.drafting.text_match import SHORTEST_MATCH, find_match
from sglang_dflash.tools.bench import datasets
from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from sglang_dflash.tools.demo_pairs.public_target import KIND
from sglang_dflash.tools.transformers_loop import LoadedPair, load
from sglang_dflash.tools.transformers_loop.generation import _drafter
from sglang_dflash.tools.transformers_loop.target_cache import capture_hidden

TOKENS, BATCH = 160, 32
WIDEST, CONTEXT = 32, 32000
# Probabilities that a token of a better draft is right, and of a simulated draft beside recorded
# turns: on chats, half of our draft's tokens are.
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
    """A position of a text at which a step can begin.

    Attributes:
        continuation: the tokens that follow in the text.
        drafts: the draft's tokens.
        match: how many of the newest tokens occurred earlier in the text.
        looked_up: the tokens that followed there.
    """

    continuation: list[int]
    drafts: list[int]
    match: int
    looked_up: list[int]


Rule = Callable[[Position], list[int]]


def count_accepted(proposal: list[int], continuation: list[int]) -> int:
    """Count the tokens of a proposal before the first that differs from the text."""
    agree = (a == b for a, b in zip(proposal, continuation, strict=False))
    return next(
        (i for i, same in enumerate(agree) if not same), min(len(proposal), len(continuation))
    )


def pad(tokens: list[int], count: int) -> list[int]:
    """Cut or pad to `count` tokens; padding is -1."""
    return (tokens + [-1] * count)[:count]


def lookup_from(shortest: int) -> Rule:
    """Return the rule: lookup if the match has `shortest` tokens or more, else the draft."""
    return lambda at: at.looked_up[: len(at.drafts)] if at.match >= shortest else at.drafts


def lookup_if_agreed(long: int) -> Rule:
    """Return the rule: lookup if the match has `long` tokens, or if it has 2 and the draft begins
    with the same token; else the draft."""

    def rule(at: Position) -> list[int]:
        is_lookup = at.match >= long or (at.match >= 2 and at.looked_up[:1] == at.drafts[:1])
        return at.looked_up[: len(at.drafts)] if is_lookup else at.drafts

    return rule


def learn_source(width: int | None = None) -> Rule:
    """Return a server's rule for one request at a time: `DraftSource`, which learns while used."""
    counters = DraftCounters("cpu")
    source = DraftSource(width or WIDEST, vocab_size=2**31, counters=counters)

    def rule(at: Position) -> list[int]:
        count = len(at.drafts) if width is None else width - 1
        drafts, looked_up = (
            torch.tensor([pad(at.drafts, count)]),
            torch.tensor([pad(at.looked_up, count)]),
        )
        match = torch.tensor([at.match])
        classes = source.classes(match, drafts[:, 0] == looked_up[:, 0])
        looks_up = source.prefers_lookup(classes, count)
        proposal = (looked_up if looks_up else drafts)[0].tolist()
        right = count_accepted(proposal, at.continuation)
        # Beyond the text's end, the target's tokens are not known.
        tokens = torch.tensor([pad(at.continuation, count + 1)])
        outcome = Accepted(torch.tensor([right + 1]), tokens, drafts)
        by_source = DraftsBySource(torch.stack((drafts, looked_up)), classes, looks_up)
        draft_source.learn_source(source, by_source, outcome)
        return proposal

    return rule


def best(at: Position) -> list[int]:
    return max(
        at.drafts,
        at.looked_up[: len(at.drafts)],
        key=lambda proposal: count_accepted(proposal, at.continuation),
    )


RULES: dict[str, Callable[[], Rule]] = {
    "draft": lambda: lambda at: at.drafts,
    "lookup": lambda: lambda at: at.looked_up[: len(at.drafts)] if at.match >= 3 else [],
    **{f"match {n}": partial(lookup_from, n) for n in (2, 3, 4, 8)},
    **{f"match {n}, or 2 and 1 agrees": partial(lookup_if_agreed, n) for n in (3, 4)},
    "learned": learn_source,
    "best of both": lambda: best,
    **{f"learned, width {w}": partial(learn_source, w) for w in (16, 32)},
}


def tasks(folder: str) -> dict[str, list[Prompt]]:
    """Return the prompts of each kind of text."""
    chats = datasets.from_file(datasets.CHAT)
    files = sorted(Path(folder).glob("*.jsonl")) if folder else []
    return {"chat": chats, SAMPLED: chats} | {file.stem: datasets.from_file(file) for file in files}


def noise(tokenizer: Any, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts and their continuations, of uniformly drawn letters, digits and marks."""
    rng = random.Random(0)
    letters = string.ascii_letters + string.digits + string.punctuation + " \n"
    for _ in range(count):
        ids = tokenizer("".join(rng.choices(letters, k=600)))["input_ids"]
        yield ids[:-TOKENS], ids[-TOKENS:]


@torch.inference_mode()
def replay(
    pair: LoadedPair, prompt: list[int], answer: list[int] | None, greedy: bool
) -> list[Position]:
    """Return all positions of a text at which a step can begin. `answer`: None to generate it."""
    if answer is None:
        torch.manual_seed(0)
        how = (
            {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        )
        ids = torch.tensor([prompt])
        generated = pair.target.generate(ids, pad_token_id=0, max_new_tokens=TOKENS, **how)
        answer = generated[0, len(prompt) :].tolist()
    text = torch.tensor(prompt + answer)
    with capture_hidden(pair.target, pair.draft.config.target_layer_ids) as hidden:
        pair.target(text[None])
        states = hidden()
    total, options = len(text), DraftOptions().resolve(pair.draft.config)
    slots = torch.arange(total + options.verify_block)
    drafter = _drafter(pair.draft, pair.target, options, len(slots), torch.device("cpu"))
    drafter.absorb(states, slots[:total], slots[:total])
    positions = []
    for at in torch.arange(len(prompt), total - 1).split(BATCH):
        rows = torch.zeros_like(at)
        context = RequestSlots(slots[None].int(), rows, at, total)
        drafts = likeliest(drafter.propose(text[at], context))[:, 1:]
        requests = RequestSlots(text[None].int(), rows, at, total - 1)
        match, looked_up = find_match(text[at], requests.req_to_token, requests, WIDEST - 1)
        parts: list[Tensor] = [drafts, match, looked_up]
        for i, *three in zip(at.tolist(), *(part.tolist() for part in parts), strict=True):
            positions.append(Position(text[i + 1 :].tolist(), *three))
    return positions


def tokens_per_step(positions: list[Position], rule: Rule) -> float:
    at, steps = 0, 0
    while at < len(positions):
        at += count_accepted(rule(positions[at]), positions[at].continuation) + 1
        steps += 1
    return len(positions) / steps


def better_draft(replays: list[list[Position]], chance: float) -> list[list[Position]]:
    """Return the positions with other drafts, whose tokens are right with probability `chance`."""
    rng = random.Random(0)

    def drafts(at: Position) -> list[int]:
        tokens = pad(at.continuation, len(at.drafts))
        return [token if rng.random() < chance else -1 for token in tokens]

    return [[at._replace(drafts=drafts(at)) for at in positions] for positions in replays]


def recorded_positions(text: recorded.RecordedText, chance: float) -> list[Position]:
    """Return the positions of a recorded answer, with simulated drafts whose tokens are right with
    probability `chance`."""
    positions = []
    for at in range(text.begin + 1, len(text.ids)):
        continuation = text.ids[at : at + WIDEST].tolist()
        match = text.match(at)[0]
        # A server does not take a shorter one.
        match = match if match >= SHORTEST_MATCH else 0
        looked_up = pad(text.followers(at, WIDEST - 1) if match else [], WIDEST - 1)
        drafts = [-1] * (RECORDED_BLOCK - 1)
        positions.append(Position(continuation, drafts, match, looked_up))
    return better_draft([positions], chance)[0]


def replay_recorded(file: Path) -> dict[str, Any]:
    """Return the tokens per step of lookup alone, and of a server's choice between lookup and
    simulated drafts."""
    cases = recorded.texts_of(recorded.read(file))
    beside: dict[str, dict[str, float]] = {}
    for chance in RECORDED:
        replays = [recorded_positions(text, chance) for text in cases]
        beside[str(chance)] = by_rule(replays, ("draft", "learned", "best of both"))
    return {**recorded.run(cases), "beside_a_draft": beside}


def by_rule(
    replays: list[list[Position]], names: Collection[str] = tuple(RULES)
) -> dict[str, float]:
    """Return the tokens per step of each rule, over all texts."""
    tokens = sum(map(len, replays))
    steps = dict.fromkeys(names, 0.0)
    for name in names:
        rule = RULES[name]()
        for positions in replays:
            steps[name] += len(positions) / tokens_per_step(positions, rule)
    return {name: round(tokens / step_count, 3) for name, step_count in steps.items()}


def lookup_ms(block: int) -> float:
    """Return the median time of a lookup in a random text of `CONTEXT` tokens, in milliseconds."""
    text = torch.randint(2000, (1, CONTEXT + block), dtype=torch.int32)
    newest, row, length = text[:, -block].long(), torch.tensor([0]), torch.tensor([CONTEXT])
    times = []
    for _ in range(12):
        began = time.perf_counter()
        find_match(newest, text, RequestSlots(text, row, length, CONTEXT), block - 1)
        times.append(time.perf_counter() - began)
    return round(1000 * statistics.median(times[2:]), 3)


def run(options: Options) -> dict[str, Any]:
    if options.recorded:
        return replay_recorded(Path(options.recorded))
    named = demo_pair(KIND)
    pair = load(str(named.target), str(named.draft))
    rows = {}
    for source, prompts in tasks(options.prompts).items():
        chosen = datasets.select(prompts, options.texts, seed=0)
        ids = [datasets.encode_turn(pair.tokenizer, prompt, [], None) for prompt in chosen]
        replays = [replay(pair, prompt_ids, None, source != SAMPLED) for prompt_ids in ids]
        rows[source] = by_rule(replays)
        if source != SAMPLED:
            rows |= {f"{source} {p}": by_rule(better_draft(replays, p)) for p in BETTER}
    random_texts = noise(pair.tokenizer, options.texts)
    rows["random"] = by_rule([replay(pair, *texts, greedy=True) for texts in random_texts])
    block = pair.draft.config.block_size
    sizes = {"block_size": block, "tokens": TOKENS, "context": CONTEXT}
    return {**sizes, "lookup_ms": lookup_ms(block), "rows": rows}


def table(result: dict[str, Any]) -> list[str]:
    if "cases" in result:
        return recorded.table(result)
    kinds = list(result["rows"])
    lines = [f"{'tokens per step':32}" + "".join(f"{source:>15}" for source in kinds)]
    lines.append(f"lookup in {result['context']} tokens takes {result['lookup_ms']} ms")
    return lines + [
        f"{rule:32}" + "".join(f"{result['rows'][source][rule]:15.2f}" for source in kinds)
        for rule in RULES
    ]
