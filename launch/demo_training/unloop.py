"""A last stage of the target's training: a small model must not repeat itself for ever.

Greedy continuations of a small model fall into repetition loops, in which any drafter looks good
and text is useless. The model is trained on library text and, beside it, against its own loops:
unlikelihood training on sequences (Welleck et al., arXiv 1908.04319).
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from . import data
from .decoder import Decoder
from .figures import loop_start
from .loop import train
from .target import next_token_loss

# Loops are collected again from the model as it is after every `ROUND` steps.
ROUND = 30
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 256, (48, 160), 128
TEXTS, LOOPS = 4, 8
WINDOW = 448
WEIGHT = 1.0
LR = 1e-3


def unlikelihood(model: PreTrainedModel, ids: Tensor, unwanted: Tensor) -> Tensor:
    """Mean -log(1 - p) over the tokens of `ids` `[B, L]` that `unwanted` bool `[B, L]` marks."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    p = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].exp()
    marked = unwanted[:, 1:]
    return -(1 - p[marked]).clamp_min(1e-4).log().sum() / marked.sum().clamp_min(1)


def collect_loops(
    model: PreTrainedModel, stream: Tensor, rng: random.Random
) -> tuple[Tensor, Tensor, float]:
    """Greedy continuations that loop: ids `[n, L]`, which of them are repeats, and their share.

    The share is that of loop tokens in all new tokens.
    """
    length = rng.randrange(*PROMPT_TOKENS)
    starts = [rng.randrange(len(stream) - length) for _ in range(PROMPTS)]
    prompts = torch.stack([stream[s : s + length] for s in starts])
    rows, marks, looped = [], [], 0
    for batch in prompts.split(128):
        decoder = Decoder(model, ())
        _, logits = decoder.start(batch, length + NEW_TOKENS)
        new = []
        for _ in range(NEW_TOKENS):
            new.append(logits.argmax(-1))
            if len(new) < NEW_TOKENS:
                _, logits = decoder.extend(new[-1][:, None])
        text = torch.stack(new, dim=1)
        for prompt, tokens in zip(batch, text, strict=True):
            begin = loop_start(tokens.tolist())
            looped += NEW_TOKENS - begin
            if begin < NEW_TOKENS:
                repeat = begin + loop_period(tokens[begin:].tolist())
                ids = torch.cat((prompt, tokens))
                rows.append(ids)
                marks.append(torch.arange(len(ids)) >= length + repeat)
    share = looped / (PROMPTS * NEW_TOKENS)
    return torch.stack(rows), torch.stack(marks), share


def loop_period(tokens: list[int]) -> int:
    """The shortest period of `tokens`, which repeat it from the first to the last."""
    return next(p for p in range(1, len(tokens) + 1) if tokens[p:] == tokens[:-p])


def train_unloop(
    model: PreTrainedModel, stream: Tensor, tokenizer: Tokenizer, work: Path, steps: int
) -> PreTrainedModel:
    """Train `model` in place. An interrupted run resumes, its loops included."""
    windows = data.WindowSampler(stream, tokenizer, WINDOW, chat_share=0.1)
    loops: dict[str, Tensor] = {}

    def collect(step: int) -> None:
        if loops and step % ROUND:
            return
        number = step // ROUND
        file = work / f"unloop.{number}.pt"
        if not file.exists():
            ids, repeats, share = collect_loops(model, stream, random.Random(f"loops-{number}"))
            print(f"unloop, round {number}: {share:.1%} of greedy tokens in loops", flush=True)
            torch.save({"ids": ids, "repeats": repeats}, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").replace(file)
        loops.update(torch.load(file))

    def loss_of(rng: random.Random) -> tuple[Tensor, dict[str, float]]:
        loss, accuracy = next_token_loss(model, windows.sample(TEXTS, rng))
        rows = torch.tensor([rng.randrange(len(loops["ids"])) for _ in range(LOOPS)])
        against = unlikelihood(model, loops["ids"][rows], loops["repeats"][rows])
        figures = {"text": loss.item(), "accuracy": accuracy, "against": against.item()}
        return loss + WEIGHT * against, figures

    train("unloop", model, loss_of, steps=steps, lr=LR, work=work, before_step=collect)
    return model.eval()
