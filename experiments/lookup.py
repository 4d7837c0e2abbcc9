"""Drafts, or what the text has held before: tokens per step of each rule, by replay, on a CPU.

A text is replayed on the `code` pair: at every position the draft proposes a block, and the newest
tokens are looked up in the text before. A rule decides which of the two a step verifies; a step
commits its drafts up to the first that differs from the text, and the text's next token. So all
rules see the same text, and nothing has to be served. At the end, what lookup takes of a step at
32,000 tokens.

Texts: `plain` and `agents` are the target's greedy answers, `sampled` its answers at temperature 1
(a small target's greedy answers run into loops, which lookup likes). `quote`, `edit`, `tools` and
`random` are given, because a small target does not copy: a passage of unseen code twice; with an
edit of one to three tokens in every 40; calls that quote from a tool's result, new code in between;
random characters. The draft sees the target's hidden states along the text.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from experiments import recorded, texts
from sglang_dflash.bench.datasets import stdlib_functions
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.lookup import continue_seen, seen_before
from sglang_dflash.drafting.options import Options as DraftOptions
from sglang_dflash.facts.command_line import setting
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.transformers_loop import LoadedPair, load
from sglang_dflash.transformers_loop.generation import _drafter
from sglang_dflash.transformers_loop.target_cache import captured_hidden

PASSAGE, PROMPT, TOKENS, BATCH = 400, 300, 160, 32
WIDEST, CONTEXT = 32, 32000
KINDS = ("plain", "sampled", "agents", "tools", "quote", "edit", "random")


@dataclass(frozen=True)
class Options:
    texts: int = setting(8, "texts of each kind (default {default})")
    recorded: str = setting(
        "", "replay lookup alone on this JSON file of recorded agent turns, without a model"
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


def accepted(proposal: list[int], rest: list[int]) -> int:
    """Tokens that agree, from the first on."""
    agree = (a == b for a, b in zip(proposal, rest, strict=False))
    return next((i for i, same in enumerate(agree) if not same), min(len(proposal), len(rest)))


def seen_from(least: int) -> Callable[[Position], list[int]]:
    """Lookup at a match of `least` tokens, else the draft."""
    return lambda at: at.seen[: len(at.drafts)] if at.match >= least else at.drafts


def agreed(long: int, first: int = 1, width: int | None = None) -> Callable[[Position], list[int]]:
    """And at a match of 2 tokens, if the draft begins with the same `first` ones."""

    def rule(at: Position) -> list[int]:
        same = at.seen[:first] == at.drafts[:first]
        taken = at.match >= long or (at.match >= 2 and same)
        return at.seen[: width or len(at.drafts)] if taken else at.drafts

    return rule


def best(at: Position) -> list[int]:
    return max(at.drafts, at.seen[: len(at.drafts)], key=lambda some: accepted(some, at.rest))


RULES: dict[str, Callable[[Position], list[int]]] = {
    "draft": lambda at: at.drafts,
    "lookup": lambda at: at.seen[: len(at.drafts)] if at.match >= 3 else [],
    **{f"match {n}": seen_from(n) for n in (2, 3, 4, 6, 8, 12)},
    **{f"match {n}, or 2 and 1 agrees": agreed(n) for n in (3, 4, 6, 8)},
    "match 8, or 2 and 2 agree": agreed(8, 2),
    "best of both": best,
    **{f"match 3, or 2 and 1 agrees, width {w}": agreed(3, width=w - 1) for w in (16, 32)},
}


def asked(kind: str, tokenizer: Any, count: int) -> Iterator[tuple[list[int], list[int] | None]]:
    """Prompts, and the texts after them; None for the target's own."""
    rng = random.Random(kind)

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    documents = [ids(prompt.turns[0]) for prompt in rng.sample(texts.unseen_documents(), 8)]

    def piece(tokens: int) -> list[int]:
        document = rng.choice(documents)
        first = rng.randrange(len(document) - tokens)
        return document[first : first + tokens]

    results = [f"\n# result of read\n{prompt.turns[0]}" for prompt in stdlib_functions()]
    agents, noise = texts.load("agents", count, "code"), texts.load("random", 2 * count, "code")
    for i in range(count):
        if kind in ("plain", "sampled"):
            yield piece(PROMPT), None
        elif kind == "agents":
            yield ids("".join(agents[i].turns[:3])), None
        elif kind == "random":
            yield ids(noise[2 * i].turns[0]), ids(noise[2 * i + 1].turns[0])[:TOKENS]
        elif kind == "tools":
            read = [ids(text) for text in rng.sample(results, 3)]
            answer: list[int] = []
            while len(answer) < TOKENS:
                source = rng.choice(read)
                first = rng.randrange(max(1, len(source) - 40))
                answer += piece(20) + source[first : first + 40]
            yield [token for source in read for token in source], answer[:TOKENS]
        else:
            passage = piece(PASSAGE)
            again = edited(passage, piece(PASSAGE), rng) if kind == "edit" else passage
            before = [*passage, *ids("\n\n# The same again:\n"), *again[:24]]
            yield before, again[24 : 24 + TOKENS]


def edited(passage: list[int], others: list[int], rng: random.Random) -> list[int]:
    """One to three tokens replaced by one to three others, once in 40 tokens."""
    found, after = [], 0
    for at in sorted(rng.sample(range(len(passage) - 3), len(passage) // 40)):
        found += passage[after:at]
        first = rng.randrange(len(others) - 3)
        found += others[first : first + rng.randint(1, 3)]
        after = max(after, at + rng.randint(1, 3))
    return found + passage[after:]


@torch.inference_mode()
def replay(pair: LoadedPair, prompt: list[int], answer: list[int] | None, greedy: bool) -> Any:
    """Every position of a text at which a step can begin."""
    if answer is None:
        torch.manual_seed(0)
        how = (
            {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        )
        end = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": TOKENS}
        answer = pair.target.generate(torch.tensor([prompt]), **how, **end)[
            0, len(prompt) :
        ].tolist()
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
        match, seen = seen_before(text[at, None], known.req_to_token, known, WIDEST - 1)
        parts: list[Tensor] = [drafts, match[:, 0], seen]
        for i, *three in zip(at.tolist(), *(part.tolist() for part in parts), strict=True):
            found.append(Position(text[i + 1 :].tolist(), *three))
    return found


def tokens_per_step(positions: list[Position], rule: Callable[[Position], list[int]]) -> float:
    at, steps = 0, 0
    while at < len(positions):
        at += accepted(rule(positions[at]), positions[at].rest) + 1
        steps += 1
    return len(positions) / steps


@torch.inference_mode()
def milliseconds(pair: LoadedPair) -> dict[str, float]:
    """Medians at a context of `CONTEXT` tokens that hold anything: the target's forward over a
    block, which is the least that a step takes, and lookup."""
    target, block = pair.target, pair.draft.config.block_size
    cache = DynamicCache(config=target.config)
    shape = 1, target.config.num_key_value_heads, CONTEXT, target.config.head_dim
    for layer in range(target.config.num_hidden_layers):
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    text = torch.randint(2000, (1, CONTEXT + block), dtype=torch.int32)
    ids, row, length = text[:, -block:].long(), torch.tensor([0]), torch.tensor([CONTEXT])

    def verify() -> None:
        target(input_ids=ids, past_key_values=cache, use_cache=True)
        cache.crop(-block)

    def look_up() -> None:
        continue_seen(ids.clone(), text, RequestSlots(text, row, length, CONTEXT), 2000)

    return {"verify_ms": median_ms(verify), "lookup_ms": median_ms(look_up)}


def median_ms(work: Callable[[], None]) -> float:
    times = []
    for _ in range(12):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return round(1000 * statistics.median(times[2:]), 3)


def run(options: Options) -> dict[str, Any]:
    if options.recorded:
        return recorded.run(Path(options.recorded))
    named = demo_pair("code")
    pair = load(str(named.target), str(named.draft))
    rows = {}
    for kind in KINDS:
        replays = [
            replay(pair, *given, greedy=kind != "sampled")
            for given in asked(kind, pair.tokenizer, options.texts)
        ]
        rows[kind] = {
            name: round(
                len(replays) / sum(1 / tokens_per_step(positions, rule) for positions in replays), 3
            )
            for name, rule in RULES.items()
        }
    sizes = {"block_size": pair.draft.config.block_size, "tokens": TOKENS, "context": CONTEXT}
    return {**sizes, **milliseconds(pair), "rows": rows}


def table(result: dict[str, Any]) -> list[str]:
    if "cases" in result:
        return recorded.table(result)
    kinds = list(result["rows"])
    lines = [f"{'tokens per step':32}" + "".join(f"{kind:>9}" for kind in kinds)]
    took = f"at {result['context']} tokens: verify {result['verify_ms']} ms, lookup "
    lines.append(f"{took}{result['lookup_ms']} ms")
    return lines + [
        f"{rule:32}" + "".join(f"{result['rows'][kind][rule]:9.2f}" for kind in kinds)
        for rule in RULES
    ]
