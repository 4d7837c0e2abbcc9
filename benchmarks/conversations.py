"""Chats whose every turn continues all that was said before: what prefix caching, and a draft KV cache beside it, live from."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.bench.server import Server
from sglang_dflash.checkpoint.embedded import DemoPair

CONVERSATIONS, TURNS, AT_A_TIME, NEW_TOKENS = 20, 6, 8, 48
FIRST_TOKEN = 200


@dataclass
class Answers:
    """What a server answered, request by request: output ids, prompt tokens found cached, verify steps."""

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
        """Tokens per verify step: all but each request's first, which its prefill gives."""
        return sum(len(output) - 1 for output in self.outputs) / max(1, sum(self.steps))


def texts(pair: DemoPair) -> list[list[int]]:
    """Token ids of the demo prompts, of which every workload takes its pieces."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    return [tokenizer(prompt)["input_ids"] for prompt in pair.prompts]


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


def chats(server: Server, pieces: list[list[int]], seed: int = 0) -> Answers:
    """20 conversations of 6 turns, 8 requests at a time; each turn all conversations in another order."""
    rng, answers = random.Random(seed), Answers()
    # First tokens of their own: what is found cached is a conversation's past, whoever was answered first.
    said = [[FIRST_TOKEN + i] for i in range(CONVERSATIONS)]
    for turn in range(TURNS):
        order = rng.sample(range(CONVERSATIONS), CONVERSATIONS)
        for i in order:
            said[i] = said[i] + pieces[(i + 7 * turn) % len(pieces)][: rng.randint(30, 150)]
        for i, output in zip(
            order, ask(server, [said[i] for i in order], answers, AT_A_TIME), strict=True
        ):
            said[i] = said[i] + output
    return answers


def branches(server: Server, pieces: list[list[int]], count: int = 32) -> Answers:
    """One long prompt, then many that share its first 400 tokens and end early: the draft K/V of what they share was never made,
    because the first prompt's drafts could not see it."""
    answers = Answers()
    trunk = [token for piece in pieces for token in piece]
    ask(server, [trunk[:1000]], Answers(), 1)
    prompts = [
        [*trunk[:400], FIRST_TOKEN + i, *pieces[(i + 5) % len(pieces)][: 10 + i]]
        for i in range(count)
    ]
    ask(server, prompts, answers, AT_A_TIME)
    return answers
