"""Figures of a pair: acceptance, repetition loops, n-gram lookup, the target's loss."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.transformers_loop.generation import spec_generate

from . import data
from .target import next_token_loss


@dataclass(frozen=True)
class Answer:
    """One generated answer.

    Attributes:
        prompt, tokens: token ids.
        steps: (place, count): a verify step committed `count` tokens, the first of which is
            `tokens[place]`. The prefill's token is not part of a step.
        loop_start: where a repetition loop begins in `tokens`; their number if there is none.
    """

    prompt: list[int]
    tokens: list[int]
    steps: list[tuple[int, int]]
    loop_start: int

    def begun(self, tokens: int) -> Answer:
        """The first `tokens` tokens, as if generation had stopped there."""
        first = self.tokens[:tokens]
        steps = [(at, min(count, tokens - at)) for at, count in self.steps if at < tokens]
        return Answer(self.prompt, first, steps, loop_start(first))

    def counts(self, loop: bool | None) -> list[int]:
        """Tokens of the steps that begin inside a loop, outside of it, or (None) of all."""
        return [n for at, n in self.steps if loop is None or (at >= self.loop_start) == loop]

    def lookup(self, block_size: int) -> Answer:
        """The same answer, decoded with n-gram lookup in place of the draft."""
        counts = prompt_lookup(self.prompt, self.tokens, block_size)
        return Answer(self.prompt, self.tokens, with_places(counts), self.loop_start)


def with_places(committed: Iterable[int]) -> list[tuple[int, int]]:
    """`Answer.steps` of consecutive steps."""
    steps, at = [], 1
    for count in committed:
        steps.append((at, count))
        at += count
    return steps


def answer(
    draft: DraftModel, target: PreTrainedModel, prompt: list[int], new_tokens: int, **options: Any
) -> Answer:
    """Decode with the offline loop in the dtype of the models. `options`: of `spec_generate`."""
    out = spec_generate(draft, target, torch.tensor([prompt]), new_tokens, **options)
    return Answer(prompt, out.tokens, with_places(out.committed), loop_start(out.tokens))


def mean(counts: Iterable[int]) -> float:
    """Mean of the counts, 0 if there are none."""
    values = list(counts)
    return sum(values) / max(1, len(values))


def acceptance(answers: Iterable[Answer], loop: bool | None = None) -> float:
    """Tokens per verify step, over all steps of `Answer.counts(loop)`."""
    return mean(count for one in answers for count in one.counts(loop))


def loop_share(answers: Iterable[Answer]) -> float:
    """Share of the tokens that are in repetition loops."""
    ended = [(len(one.tokens) - one.loop_start, len(one.tokens)) for one in answers]
    return sum(inside for inside, _ in ended) / max(1, sum(total for _, total in ended))


def by_position(answers: Iterable[Answer], block_size: int, loop: bool | None) -> list[float]:
    """Share of the steps that accept at least k drafted tokens, for k from 1."""
    counts = [count for one in answers for count in one.counts(loop)]
    return [mean(int(n > k) for n in counts) for k in range(1, block_size)]


def loop_start(tokens: list[int], longest: int = 40, repeats: int = 3) -> int:
    """Start of a tail that repeats one period `repeats` times or more; the end if there is none.

    `longest`: the longest period, in tokens.
    """
    for period in range(1, longest + 1):
        n = len(tokens)
        while n > period and tokens[n - 1] == tokens[n - 1 - period]:
            n -= 1
        if len(tokens) - n >= (repeats - 1) * period and len(tokens) - n > period:
            return max(0, n - period)
    return len(tokens)


def prompt_lookup(prompt: list[int], output: list[int], block_size: int) -> list[int]:
    """Tokens per verify step with prompt lookup.

    Drafts are copied from after the last earlier occurrence of the last 3 (or 2, or 1) tokens.
    """
    text, end, committed = prompt + output[:1], len(prompt) + len(output), []
    while len(text) < end:
        drafts: list[int] = []
        for n in (3, 2, 1):
            key = text[-n:]
            found = next(
                (i for i in range(len(text) - n - 1, -1, -1) if text[i : i + n] == key), None
            )
            if found is not None:
                drafts = text[found + n : found + n + block_size - 1]
                break
        truth = (prompt + output)[len(text) : len(text) + block_size]
        accepted = next(
            (i for i, d in enumerate(drafts) if i >= len(truth) - 1 or d != truth[i]), len(drafts)
        )
        committed.append(accepted + 1)
        text += truth[: accepted + 1]
    return committed


class BlindDraft(DraftModel):
    """The ablation: a draft whose context K/V are zero, so that it sees its own block only."""

    def project_context(self, features: Tensor) -> Tensor:
        return torch.zeros_like(super().project_context(features))


def blinded(draft: DraftModel) -> DraftModel:
    """A copy of `draft` that sees nothing of the target's hidden states."""
    blind = BlindDraft(draft.config)
    blind.load_state_dict(draft.state_dict())
    return blind.freeze()


def without_windows(draft: DraftModel) -> DraftModel:
    """A copy of `draft` whose layers read the whole context."""
    layers = tuple(replace(layer, sliding_window=None) for layer in draft.config.layers)
    whole = DraftModel(replace(draft.config, layers=layers))
    whole.load_state_dict(draft.state_dict())
    return whole.freeze()


@torch.no_grad()
def mean_loss(target: PreTrainedModel, tokenizer: Tokenizer, files: dict[str, str]) -> float:
    """Mean cross entropy of the target on random windows of the files, in nats per token."""
    sampler = data.WindowSampler(
        data.token_stream(tokenizer, files), tokenizer, 448, chat_share=0.0
    )
    rng = random.Random(0)
    return sum(next_token_loss(target, sampler.sample(8, rng))[0].item() for _ in range(6)) / 6


def tokens_per_byte(tokenizer: Tokenizer, files: dict[str, str]) -> float:
    """Tokens per byte of text, the end-of-text tokens included."""
    return len(data.token_stream(tokenizer, files)) / sum(len(t.encode()) for t in files.values())
