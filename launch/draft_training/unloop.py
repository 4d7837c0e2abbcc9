"""A last stage of the target's training: a small model must not repeat itself for ever.

Greedy continuations of a small model fall into repetition loops, in which any drafter looks good
and text is useless. The model is trained on library text and, beside it, against its own loops:
unlikelihood training on sequences (Welleck et al., arXiv 1908.04319).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import data
from .continuations import cut_prompts, generate
from .figures import loop_start
from .loop import train
from .target import next_token_loss

PROMPTS, NEW_TOKENS = 256, 128
LOOPS = 8


@dataclass(frozen=True)
class Course:
    """One run of training against loops, from the same trained model.

    Attributes:
        name: of its state file; it seeds the data.
        share: of its weights in the average that is the target.
        round: steps after which loops are collected anew, from the model as it then is.
        texts: windows of library text per step, beside `LOOPS` loops.
        allowed: the first so many tokens of a loop are not held against the model, if its period is
            short, because library code repeats short pieces two or three times. Its first period
            never is.
    """

    name: str
    share: float
    steps: int
    lr: float
    warmup: int
    round: int
    texts: int
    allowed: int


# The average forgets less and loops less than either run does by itself. Held-out loss in nats per
# token, and share of 128 greedy tokens in loops: trained model 2.44, 65 %; first run 2.94, 13 %;
# second run 2.63, 34 %; the average, 0.15 of it the trained model: see the card.
COURSES = (
    Course("unloop", 0.55, steps=90, lr=1e-3, warmup=30, round=30, texts=4, allowed=0),
    Course("unloop-short", 0.30, steps=40, lr=5e-4, warmup=8, round=20, texts=5, allowed=24),
)


def unlikelihood(model: PreTrainedModel, ids: Tensor, unwanted: Tensor) -> Tensor:
    """Mean -log(1 - p) over the tokens of `ids` `[B, L]` that `unwanted` bool `[B, L]` marks."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    p = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].exp()
    marked = unwanted[:, 1:]
    return -(1 - p[marked]).clamp_min(1e-4).log().sum() / marked.sum().clamp_min(1)


def collect_loops(
    model: PreTrainedModel, stream: Tensor, rng: random.Random, allowed: int
) -> tuple[Tensor, Tensor, float]:
    """Greedy continuations that loop: ids `[n, L]`, which of them are repeats, and their share.

    The share is that of loop tokens in all new tokens.
    """
    prompts = cut_prompts(stream, rng, PROMPTS)
    length = prompts.shape[1]
    rows, marks, looped = [], [], 0
    for batch in prompts.split(128):
        text = generate(model, batch, NEW_TOKENS)[:, length:]
        for prompt, tokens in zip(batch, text, strict=True):
            begin = loop_start(tokens.tolist())
            looped += NEW_TOKENS - begin
            if begin < NEW_TOKENS:
                period = loop_period(tokens[begin:].tolist())
                repeat = begin + max(period, min(3 * period, allowed))
                ids = torch.cat((prompt, tokens))
                rows.append(ids)
                marks.append(torch.arange(len(ids)) >= length + repeat)
    share = looped / (PROMPTS * NEW_TOKENS)
    return torch.stack(rows), torch.stack(marks), share


def loop_period(tokens: list[int]) -> int:
    """The shortest period of `tokens`, which repeat it from the first to the last."""
    return next(p for p in range(1, len(tokens) + 1) if tokens[p:] == tokens[:-p])


def train_unloop(model: PreTrainedModel, windows: data.WindowSampler, work: Path) -> None:
    """Make `model` the average of itself and of what the `COURSES` make of it. Interrupted courses
    resume.

    `windows`: of library text, on which it was trained.
    """
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    average = {
        name: value * (1 - sum(course.share for course in COURSES))
        for name, value in trained.items()
    }
    for course in COURSES:
        model.load_state_dict(trained)
        run_course(course, model, windows, work)
        for name, value in model.state_dict().items():
            average[name] += course.share * value
    model.load_state_dict(average)


def run_course(
    course: Course, model: PreTrainedModel, windows: data.WindowSampler, work: Path
) -> None:
    """Train `model` in place."""
    loops: dict[str, Tensor] = {}

    def collect(step: int) -> None:
        if loops and step % course.round:
            return
        number = step // course.round
        file = work / f"{course.name}.{number}.pt"
        if not file.exists():
            rng = random.Random(f"loops-{number}")
            ids, repeats, share = collect_loops(model, windows.stream, rng, course.allowed)
            print(f"{course.name} {step}: {share:.1%} of greedy tokens in loops", flush=True)
            torch.save({"ids": ids, "repeats": repeats}, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").replace(file)
        loops.update(torch.load(file))

    def loss_of(rng: random.Random) -> tuple[Tensor, dict[str, float]]:
        loss, accuracy = next_token_loss(model, windows.sample(course.texts, rng))
        rows = torch.tensor([rng.randrange(len(loops["ids"])) for _ in range(LOOPS)])
        against = unlikelihood(model, loops["ids"][rows], loops["repeats"][rows])
        figures = {"text": loss.item(), "accuracy": accuracy, "against": against.item()}
        return loss + against, figures

    train(
        course.name,
        model,
        loss_of,
        steps=course.steps,
        lr=course.lr,
        work=work,
        warmup=course.warmup,
        before_step=collect,
    )
