"""The soak's prompts, and plain decoding's answers to them.

Greedy decoding does not depend on how many tokens are asked for: the answer to fewer of them is the
beginning of the answer to all.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import random
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine.feature_requests import NESTED, POINT, REGULAR

# Two logits nearer than this may change places if sums are taken in another order, as after a
# retraction, whose prompt is longer. In units of log-probability; float32.
TIE = 1e-4
# Places in the text at which several prompts begin, so that they share prefixes.
STARTS = (0, 9_000, 21_000, 40_000)
GRAMMARS: tuple[dict[str, str], ...] = (
    {"json_schema": json.dumps(POINT)},
    {"ebnf": NESTED},
    *({"regex": pattern} for pattern in REGULAR),
)
GRAMMAR_TOKENS = 120


@dataclass(frozen=True)
class Expected:
    """Plain decoding's greedy answer.

    Attributes:
        prompt: token ids.
        sampling: parameters beside the number of tokens.
        tokens: the answer.
        logprobs: of its tokens.
        margins: log-probability of each token minus that of the next likely one.
    """

    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int]
    logprobs: list[float]
    margins: list[float]

    def differs_at(self, got: list[int], whole: bool, asked: int) -> int | None:
        """The first position at which an answer differs; None if it does not.

        Args:
            got: the answer's tokens.
            whole: whether it ran to its end; otherwise it is a beginning.
            asked: tokens that were asked for, at most.
        """
        expected = self.tokens[:asked]
        for at, (a, b) in enumerate(zip(got, expected, strict=False)):
            if a != b:
                return at
        if len(got) > len(expected) or (whole and len(got) < len(expected)):
            return min(len(got), len(expected))
        return None

    def is_tie(self, at: int) -> bool:
        """Return whether a difference at that position may be one of rounding."""
        return at < len(self.margins) and self.margins[at] < TIE


@dataclass(frozen=True)
class Plan:
    """Size of a soak.

    Attributes:
        pair: a demo pair's name.
        prompts: greedy prompts without a grammar.
        longest_prompt, longest_answer: in tokens.
        seed: decides prompts, and everything that the clients do.
    """

    pair: str
    prompts: int
    longest_prompt: int
    longest_answer: int
    seed: int = 0


@functools.cache
def _text(pair: str) -> list[int]:
    """Token ids of standard-library source, 45,000 and more. Outputs after it mean little: the demo
    targets were trained on 448 tokens at a time."""
    from transformers import AutoTokenizer

    sources = "".join(inspect.getsource(module) for module in (argparse, typing, inspect))
    return AutoTokenizer.from_pretrained(demo_pair(pair).target)(sources)["input_ids"][:45_000]


def prompts(plan: Plan) -> list[list[int]]:
    """Prompts of 1 to `longest_prompt` tokens, short ones more often; half of them share starts."""
    random_ = random.Random(plan.seed)
    found = []
    for index in range(plan.prompts):
        length = round(math.exp(random_.uniform(0, math.log(plan.longest_prompt))))
        if index == 0:
            length = plan.longest_prompt
        start = random_.choice(STARTS) if index % 2 else random_.randrange(40_000)
        found.append(_text(plan.pair)[start : start + length])
    return found


def expected(server: Server, plan: Plan) -> list[Expected]:
    """The answers of a server without speculation."""
    jobs: list[tuple[list[int], dict[str, Any]]] = [
        (prompt, {"max_new_tokens": plan.longest_answer, "ignore_eos": True})
        for prompt in prompts(plan)
    ]
    short = [prompt[:200] for prompt in prompts(plan)[1 : 1 + 2 * len(GRAMMARS)]]
    jobs += [
        (prompt, {"max_new_tokens": GRAMMAR_TOKENS, **GRAMMARS[i % len(GRAMMARS)]})
        for i, prompt in enumerate(short)
    ]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda job: _ask(server, *job), jobs))


def _ask(server: Server, prompt: list[int], sampling: dict[str, Any]) -> Expected:
    from tests.engine.client import post

    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, **sampling},
        "return_logprob": True,
        "top_logprobs_num": 2,
        # Of the output only.
        "logprob_start_len": -1,
    }
    answer = post(server, "generate", body)
    info, tokens = answer.json()["meta_info"], answer.json()["output_ids"]
    margins = [top[0][0] - top[1][0] for top in info["output_top_logprobs"]]
    logprobs = [own[0] for own in info["output_token_logprobs"]]
    kept = {k: v for k, v in sampling.items() if k != "max_new_tokens"}
    return Expected(prompt, kept, tokens, logprobs, margins)
