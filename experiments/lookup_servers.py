"""Servers of the `code` pair with and without lookup, on text that copies and text that does not.

With `--block`, a third one has longer blocks, of which lookup fills the rest. All run at once in
turns, on the texts of the experiment `lookup`. A given text is what a grammar of token ids leaves
of the target's answer, because the target is too small to copy. They must answer alike, or nothing
is reported.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from experiments.lookup import TOKENS, asked
from experiments.runner import all_at_once, exact_turns
from experiments.width import ratio
from sglang_dflash.bench import load
from sglang_dflash.bench.datasets import Prompt
from sglang_dflash.bench.server import demo_config
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.facts.command_line import setting
from sglang_dflash.facts.embedded import demo_pair

KINDS = "quote,edit,tools,agents,plain,random"
LEVELS = (1, 8)


@dataclass(frozen=True)
class Options:
    rounds: int = setting(4, "measured passes per arm, text and concurrency (default: {default})")
    texts: int = setting(8, "texts of each kind (default: {default})")
    kinds: str = setting(KINDS, "which of them (default: {default})")
    width: str = setting("fixed", "--speculative-dflash-width of all (default: {default})")
    block: int = setting(0, "block size of a third server, 0 for none (default: {default})")


class Asked(NamedTuple):
    """Token ids of a prompt, and SGLang's sampling parameters."""

    prompt: list[int]
    sampling: Mapping[str, Any]


def run(options: Options) -> dict[str, Any]:
    """Raises RuntimeError if the servers' outputs differ."""
    named = demo_pair("code")
    tokenizer: Any = AutoTokenizer.from_pretrained(named.target)
    off = demo_config(named, dflash=True).with_flags(
        {"--incremental-streaming-output": True, "--speculative-dflash-width": options.width}
    )
    configs = {"off": off, "on": off.with_flags({"--speculative-dflash-lookup": "on"})}
    if options.block:
        wide = {"--speculative-num-draft-tokens": options.block}
        configs["wide"] = configs["on"].with_flags(wide)
    rows, number = [], itertools.count()
    with all_at_once(configs) as servers:
        arms = {name: load.SGLang(server.url) for name, server in servers.items()}
        for kind in options.kinds.split(","):
            texts = [
                Asked(prompt, sampling(answer, next(number)))
                for prompt, answer in asked(kind, tokenizer, options.texts)
            ]
            for level in LEVELS:
                found = compared(arms, texts, level, options.rounds)
                rows.append({"text": kind, "concurrency": level, **found})
        shown = servers["on"].dflash()
    sources = {name: of for name, of in shown.items() if name.endswith("_by_source")}
    return {"tokens": TOKENS, "block": options.block, "rows": rows, **sources}


def sampling(answer: list[int] | None, number: int) -> dict[str, Any]:
    """Greedy, and nothing but that answer if one is given, each with another number.

    A grammar of its text would allow other tokens than those that stand in the prompt. XGrammar's
    cache takes two grammars of tokens for one if as many are left, so each has another length.
    """
    if answer is None:
        return {**load.GREEDY, "ignore_eos": True}
    tokens = [*answer, *answer[:1] * (number * len(answer))]
    return {**load.GREEDY, "ebnf": f"root ::= {' '.join(f'Token({one})' for one in tokens)}"}


def compared(
    arms: Mapping[str, load.SGLang], texts: Sequence[Asked], level: int, rounds: int
) -> dict[str, Any]:
    """Throughput with lookup and without, `level` requests at a time."""
    prompts = [Prompt((str(i),), chat=False) for i in range(len(texts))]

    def ask(to: Any, prompt: Prompt, _: list[str]) -> load.Answer:
        one = texts[int(prompt.turns[0])]
        ends = bool(one.sampling.get("ignore_eos"))
        return load.SGLang(to.url, one.sampling).ask(one.prompt, TOKENS, ignore_eos=ends)

    def turn(name: str, _: int) -> load.Pass:
        return load.run(arms[name], prompts, level, ask)

    turns = exact_turns(arms, rounds, turn)
    speeds = {name: [one.tokens_per_second for one in passes] for name, passes in turns.items()}
    result: dict[str, Any] = {"identical": True, **ratio(speeds["on"], speeds["off"])}
    if "wide" in speeds:
        result |= {f"wide_{name}": of for name, of in ratio(speeds["wide"], speeds["off"]).items()}
    for name, passes in turns.items():
        steps = sum((one.speculation for one in passes), VerifySteps())
        result[f"{name}_tokens_per_second"] = round(statistics.median(speeds[name]), 1)
        result[f"{name}_tokens_per_step"] = round(steps.acceptance_length or 1.0, 2)
    return result


def table(result: dict[str, Any]) -> list[str]:
    arms = ["off", "on", *(["wide"] if result.get("block") else [])]
    lines = [f"text       at once   {', '.join(arms)}: tok/s; tok/step; ratios, at least"]
    for row in result["rows"]:
        of = (f"{row[f'{arm}_{what}']:8.2f}" for what in ("tokens_per_second", "tokens_per_step")
              for arm in arms)  # fmt: skip
        ratios = [f"{row[name]:10.3f}" for name in row if name.endswith(("ratio", "lower"))]
        lines.append(f"{row['text']:10}{row['concurrency']:8}{''.join((*of, *ratios))}")
    return lines
