"""Extensions of the worker that record what choosing a width needs: the drafter's confidence and
the outcomes, or the cost of every width."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.drafter import Drafter, TargetHead
from sglang_dflash.drafting.parallel import TensorParallel, argmax_of_shards
from sglang_dflash.drafting.width import FixedWidth
from sglang_dflash.serving.step.extension import Extension, Step, StepObserver


class Recorder(StepObserver):
    """Keeps of each step the requests, the accepted drafts, and the probability of each draft."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[str], list[int], list[list[float]]]] = []
        # Of the block that was drafted last, flat.
        self.confidence: Tensor | None = None

    def after_step(self, batch: Any, step: Step, accepted: Accepted, new_seq_lens: Tensor) -> None:
        assert self.confidence is not None, "a step of the whole block was drafted"
        by_request = self.confidence.view(len(batch.reqs), -1).round(decimals=4).tolist()
        taken = (accepted.lengths - 1).tolist()
        self.steps.append(([request.rid for request in batch.reqs], taken, by_request))


class RecordedWidth(FixedWidth):
    """The whole block in every step; /server_info shows what was recorded."""

    def __init__(self, block_size: int, recorder: Recorder) -> None:
        super().__init__(block_size)
        self._recorder = recorder

    def report(self) -> Mapping[str, Any]:
        return {"recorded": self._recorder.steps}


class RandomWidth(FixedWidth):
    """Any width from 1 to B at random; /server_info shows what each step took."""

    def __init__(self, block_size: int) -> None:
        self.widths = tuple(range(1, block_size + 1))
        self._random, self._taken = random.Random(0), list[tuple[int, int, float]]()

    def choose(
        self, requests: Sequence[Hashable], context: int, most: int, undrafted: int = 0
    ) -> int:
        return self._random.randint(1, max(1, min(most, self.widths[-1])))

    def took(self, seconds: float, requests: int, context: int, width: int) -> None:
        self._taken.append((requests, width, round(seconds, 6)))

    def report(self) -> Mapping[str, Any]:
        return {"taken": self._taken}


def record(target_worker: Any) -> Extension:
    """For `--speculative-dflash-extension experiments.confidence:record`; one rank."""
    recorder = Recorder()
    lm_head = target_worker.model_runner.model.lm_head
    weight = lm_head.weight[: lm_head.shard_indices.num_org_elements]

    def argmax(hidden: Tensor) -> Tensor:
        logits = hidden @ weight.T
        recorder.confidence = logits.float().softmax(-1).amax(-1)
        return argmax_of_shards(logits, 0, TensorParallel())

    def make(model: Any, head: TargetHead, *rest: Any) -> Drafter:
        return Drafter(model, replace(head, argmax=argmax), *rest)

    return Extension(
        make_drafter=make,
        observer=recorder,
        width_policy=lambda block_size: RecordedWidth(block_size, recorder),
    )


def costs(_target_worker: Any) -> Extension:
    """For `--speculative-dflash-extension experiments.confidence:costs`."""
    return Extension(width_policy=RandomWidth)
