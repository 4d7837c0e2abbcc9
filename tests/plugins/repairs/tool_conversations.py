"""Random conversations in the formats of `tool_formats.py`."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.plugins.repairs import detokenized
from tests.plugins.repairs.tool_formats import (
    FORMATS,
    JSON_ARRAY,
    PARAMETERS,
    WORDS,
    Args,
    Format,
)


def random_text(rng: random.Random, most: int = 3) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def random_args(rng: random.Random, kinds: dict[str, str]) -> Args:
    make: dict[str, Callable[[], Any]] = {
        "string": lambda: random_text(rng, 2),
        "integer": lambda: rng.randrange(1000),
        "boolean": lambda: rng.random() < 0.5,
        "array": lambda: [rng.randrange(9) for _ in range(rng.randrange(3))],
        "object": lambda: {"at": random_text(rng, 1)},
    }
    return {key: make[kind]() for key, kind in kinds.items() if rng.random() < 0.6}


def conversation(form: Format, rng: random.Random) -> str:
    """An answer: texts and groups of calls. Some are cut off, some call what is no tool."""
    parts, at = [], 0
    for _ in range(rng.choice((1, 1, 1, 2)) if form.groups else 1):
        if rng.random() < 0.6:
            parts.append(form.text(random_text(rng)))
        calls = []
        for _ in range(rng.randint(1, form.most)):
            name = rng.choice(list(PARAMETERS))
            args = random_args(rng, PARAMETERS[name])
            calls.append(form.call("nothing" if rng.random() < 0.05 else name, args, at))
            at += 1
        parts.append(form.begin + form.between.join(calls) + form.end)
    if rng.random() < 0.3:
        parts.append(form.text(random_text(rng)))
    answer = "".join(parts)
    return answer[: rng.randrange(len(answer))] if rng.random() < 0.15 else answer


@functools.cache
def tokenizer(step: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of all formats. One in `step` tags is a token."""
    rng = random.Random(0)
    every = [*FORMATS.values(), JSON_ARRAY]
    texts = (conversation(form, rng) for form in every for _ in range(30))
    return detokenized.tokenizer_of(texts, step)
