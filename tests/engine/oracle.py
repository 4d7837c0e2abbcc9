"""An extension of our worker for recurrent targets: known drafts, and the states on show.

ORACLE: a pickle of `workload.hybrid_answers`. Drafts are then some tokens of the true
continuation and wrong ones after them; how many depends on the position, from none to all. Batches
mix every case, which a real draft does only by chance.

SHOWN: a folder. After every verify step, the first rank writes to it the states of all requests
(see shown_states.py), but for `of_any_target`, and to `accepted.jsonl` one line with their accepted
lengths.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.noise import likeliest
from sglang_dflash.serving.step.extension import Extension
from sglang_dflash.serving.step.step import Step, StepObserver
from tests.engine.shown_states import show_states


class Observer(StepObserver):
    """Knows the requests of the current step, and writes down how it ended."""

    def __init__(self, folder: Path, model_runner: Any | None, tp_rank: int) -> None:
        """`model_runner`: whose states are shown, if any."""
        self.requests: list[Any] = []
        self._folder, self._runner, self._tp_rank = folder, model_runner, tp_rank

    def before_step(self, batch: Any, step: Step) -> None:
        self.requests = batch.reqs

    def after_step(self, batch: Any, step: Step, accepted: Accepted, new_seq_lens: Tensor) -> None:
        if self._tp_rank > 0:
            return
        if self._runner is not None:
            show_states(self._folder, batch, new_seq_lens, self._runner)
        with (self._folder / "accepted.jsonl").open("a") as file:
            print(json.dumps(accepted.lengths.tolist()), file=file)


class KnownDrafts:
    """A drafter whose drafts are replaced, after they have been made."""

    def __init__(
        self, drafter: Drafter, observer: Observer, continuations: dict[tuple[int, ...], list[int]]
    ) -> None:
        """`continuations`: prompt ids to output ids."""
        self._drafter, self._observer, self._continuations = drafter, observer, continuations
        self.groups, self.counters = drafter.groups, drafter.counters
        self.absorb, self.describe, self.report = drafter.absorb, drafter.describe, drafter.report

    def propose(self, bonus: Tensor, requests: RequestSlots, *_how: Any) -> Tensor:
        block = likeliest(self._drafter.propose(bonus, requests))
        rows = zip(self._observer.requests, requests.seq_lens.tolist(), strict=True)
        for row, (request, length) in enumerate(rows):
            drafts = self._drafts(tuple(request.origin_input_ids), length, block.shape[1])
            block[row, 1 : 1 + len(drafts)] = torch.tensor(drafts, dtype=block.dtype)
        return block

    def _drafts(self, prompt: tuple[int, ...], length: int, width: int) -> list[int]:
        """Return up to `width - 1` tokens after position `length`, fewer at a known text's end."""
        known = [*prompt, *self._continuations.get(prompt, [])][length + 1 : length + width]
        right = random.Random(1000 * length + len(prompt)).randrange(width)
        return [token if i < right else (token + 1) % 1000 for i, token in enumerate(known)]


def extension(target_worker: Any) -> Extension:
    return _knowing(target_worker.model_runner)


def of_any_target(_target_worker: Any) -> Extension:
    """Also of targets that are not recurrent, or whose states have other shapes."""
    return _knowing(None)


def _knowing(model_runner: Any | None) -> Extension:
    from sglang.srt.runtime_context import get_parallel

    known = pickle.loads(Path(os.environ["ORACLE"]).read_bytes())
    answers = known["prompts"] + known["chats"]
    continuations = {tuple(answer["prompt"]): answer["output_ids"] for answer in answers}
    folder = Path(os.environ["SHOWN"])
    folder.mkdir(exist_ok=True)
    observer = Observer(folder, model_runner, get_parallel().tp_rank)

    def make_drafter(*args: Any) -> KnownDrafts:
        return KnownDrafts(Drafter(*args), observer, continuations)

    return Extension(make_drafter=make_drafter, observer=observer)
