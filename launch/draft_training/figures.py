"""Figures of a pair: acceptance, repetition loops, the target's loss."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.transformers_loop.generation import Generation, spec_generate

from . import data
from .target import next_token_loss


def answers_to(
    draft: DraftModel, target: PreTrainedModel, prompts: Iterable[list[int]], new_tokens: int
) -> list[Generation]:
    """Decode greedily with the offline loop in the dtype of the models."""
    return [spec_generate(draft, target, torch.tensor([prompt]), new_tokens) for prompt in prompts]


def counts(answer: Generation, in_loops: bool) -> list[int]:
    """Tokens of the steps; without `in_loops`, of those that begin before a loop. The prefill's
    token is not part of a step."""
    end, at, found = loop_start(answer.tokens), 1, []
    for count in answer.committed:
        if in_loops or at < end:
            found.append(count)
        at += count
    return found


def acceptance(answers: Iterable[Generation], in_loops: bool = True) -> float:
    """Tokens per verify step, over all steps of `counts`."""
    every = [count for one in answers for count in counts(one, in_loops)]
    return sum(every) / max(1, len(every))


def loop_share(answers: Iterable[Generation]) -> float:
    """Share of the tokens that are in repetition loops."""
    ended = [(len(one.tokens) - loop_start(one.tokens), len(one.tokens)) for one in answers]
    return sum(inside for inside, _ in ended) / max(1, sum(total for _, total in ended))


def loop_start(tokens: list[int]) -> int:
    """Start of a tail that repeats one period of at most 40 tokens three times or more; the end if
    there is none."""
    for period in range(1, 41):
        n = len(tokens)
        while n > period and tokens[n - 1] == tokens[n - 1 - period]:
            n -= 1
        if len(tokens) - n >= 2 * period:
            return max(0, n - period)
    return len(tokens)


@torch.no_grad()
def mean_loss(target: PreTrainedModel, tokenizer: Tokenizer, files: dict[str, str]) -> float:
    """Mean cross entropy of the target on random windows of the files, in nats per token."""
    sampler = data.WindowSampler(
        data.token_stream(tokenizer, files), tokenizer, 448, chat_share=0.0
    )
    rng = random.Random(0)
    return sum(next_token_loss(target, sampler.sample(8, rng))[0].item() for _ in range(6)) / 6
