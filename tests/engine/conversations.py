"""Prompts for servers: chats, prompts that branch, one long text.

Every turn of a chat continues its whole history. That is the case for a prefix cache, and for a
draft KV cache beside it.
"""

from __future__ import annotations

import argparse
import inspect
import random
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.texts import unseen_documents
from sglang_dflash.drafting.acceptance_length import VerifySteps, of_answer
from sglang_dflash.facts.embedded import DemoPair

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server

AT_A_TIME, NEW_TOKENS = 8, 48
FIRST_TOKEN = 200


@dataclass
class Answers:
    """A server's answers by request: output ids, prompt tokens found cached, verify steps."""

    outputs: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> list[int]:
        self.outputs.append(answer["output_ids"])
        self.cached.append(answer["meta_info"]["cached_tokens"])
        self.steps.append(answer["meta_info"].get("spec_verify_ct") or 0)
        return answer["output_ids"]

    @property
    def acceptance_length(self) -> float:
        """See `drafting.acceptance_length`; 0.0 without a verify step."""
        counts = zip(self.steps, self.outputs, strict=True)
        total = sum((of_answer(steps, len(output)) for steps, output in counts), VerifySteps())
        return total.acceptance_length or 0.0


def texts(pair: DemoPair) -> list[list[int]]:
    """Token ids of the demo prompts, the pieces of all workloads."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    return [tokenizer(prompt)["input_ids"] for prompt in pair.prompts]


def long_text(pair: DemoPair, tokens: int) -> list[int]:
    """The first `tokens` token ids of standard-library source; for the `code` pair, of files that
    neither model has seen.

    Outputs after it mean little: the demo targets were trained on 448 tokens at a time.

    Raises:
        ValueError: the text is shorter.
    """
    from transformers import AutoTokenizer

    if pair.kind == "code":
        sources = "".join(document.turns[0] for document in unseen_documents())
    else:
        sources = "".join(inspect.getsource(module) for module in (argparse, typing, inspect))
    ids = AutoTokenizer.from_pretrained(pair.target)(sources)["input_ids"]
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, {tokens} are needed")
    return ids[:tokens]


def ask(
    server: Server, prompts: list[list[int]], answers: Answers, at_a_time: int
) -> list[list[int]]:
    """Greedy answers of `NEW_TOKENS` tokens, in the order of the prompts."""
    with ThreadPoolExecutor(at_a_time) as pool:
        got = pool.map(
            lambda p: server.generate(p, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True),
            prompts,
        )
        return [answers.add(answer) for answer in got]


def chats(server: Server, pieces: list[list[int]], conversations: int, turns: int) -> Answers:
    """Conversations of several turns, 8 requests at a time, in a new order every turn."""
    rng, answers = random.Random(0), Answers()
    # Conversations have different first tokens: a request finds only its own history cached.
    histories = [[FIRST_TOKEN + i] for i in range(conversations)]
    for turn in range(turns):
        order = rng.sample(range(conversations), conversations)
        for i in order:
            piece = pieces[(i + 7 * turn) % len(pieces)]
            histories[i] = histories[i] + piece[: rng.randint(30, 150)]
        outputs = ask(server, [histories[i] for i in order], answers, AT_A_TIME)
        for i, output in zip(order, outputs, strict=True):
            histories[i] = histories[i] + output
    return answers


def branches(server: Server, pieces: list[list[int]], count: int) -> Answers:
    """One long prompt, then many that share its first 400 tokens and end early.

    The draft K/V of the shared tokens was never computed, because the drafts of the first prompt
    could not see them.
    """
    answers = Answers()
    trunk = [token for piece in pieces for token in piece]
    ask(server, [trunk[:1000]], Answers(), 1)
    prompts = [
        [*trunk[:400], FIRST_TOKEN + i, *pieces[(i + 5) % len(pieces)][: 10 + i]]
        for i in range(count)
    ]
    ask(server, prompts, answers, AT_A_TIME)
    return answers
