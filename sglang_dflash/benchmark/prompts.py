"""The prompts of a benchmark."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

from sglang_dflash.bench import datasets
from sglang_dflash.bench.prompt import Prompt
from sglang_dflash.benchmark.arguments import Settings


def available(settings: Settings) -> list[Prompt]:
    """All prompts of the data set, in an order that depends on the seed only.

    Raises:
        ConfigError: the data set cannot be loaded.
    """
    if settings.dataset_file is not None:
        found = datasets.from_file(Path(settings.dataset_file))
        return datasets.select(found, len(found), settings.seed)
    name = settings.dataset or ""
    # The two embedded pairs have the same prompts.
    return datasets.load(name, datasets.ALL, model=None, cache=settings.cache, seed=settings.seed)


def repeated(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` of them, over and over if there are fewer; of each only the first turn."""
    first = (Prompt(prompt.turns[:1], prompt.chat) for prompt in cycle(prompts))
    return list(islice(first, count))
