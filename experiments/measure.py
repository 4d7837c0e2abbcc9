"""Measure a running server: output tokens per second and time per verify step.

Loads without `requests` and SGLang.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dflash.drafting.acceptance_length import VerifySteps

if TYPE_CHECKING:
    from sglang_dflash.bench.server import Server


class Run(NamedTuple):
    """One pass over the prompts.

    `verify_steps`: target forwards per request, summed; one per token in plain decoding.
    """

    tokens: int
    seconds: float
    verify_steps: int
    concurrency: int
    outputs: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def counts(self) -> VerifySteps:
        """For an acceptance length: the first token of each answer is the prefill's."""
        return VerifySteps(self.verify_steps, self.tokens - len(self.outputs))

    @property
    def step_ms(self) -> float:
        """Mean time between a request's verify steps, prefill included, in milliseconds."""
        return 1000 * self.seconds * self.concurrency / self.verify_steps


def run(server: Server, prompts: list[str], concurrency: int, new_tokens: int) -> Run:
    """Generate exactly `new_tokens` after each prompt, greedy, `concurrency` requests at a time."""

    def one(prompt: str) -> dict[str, Any]:
        return server.generate(prompt, temperature=0, max_new_tokens=new_tokens, ignore_eos=True)

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(one, prompts))
    seconds = time.perf_counter() - began
    tokens = sum(a["meta_info"]["completion_tokens"] for a in answers)
    steps = sum(
        a["meta_info"].get("spec_verify_ct") or a["meta_info"]["completion_tokens"] for a in answers
    )
    return Run(tokens, seconds, steps, concurrency, [a["output_ids"] for a in answers])
