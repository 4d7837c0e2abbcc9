"""Extensions of our worker that make a step harder: ranks that disagree, lengths that only the
device knows, drafts that take long, widths drawn at random, and recorded steps. (Known drafts:
oracle.py.)"""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.noise import SampledBlocks
from sglang_dflash.drafting.width import WidthPolicy
from sglang_dflash.serving.start import build
from sglang_dflash.serving.step.extension import Extension
from sglang_dflash.serving.step.step import Step, StepObserver
from sglang_dflash.serving.step.target_forward import TargetForwardByWidth
from tests.engine import oracle
from tests.recording import OpRecorder


class OtherDrafts(Drafter):
    """Other drafts in a third of the positions."""

    def propose(self, bonus: Tensor, requests: RequestSlots, *how: Any) -> Any:
        return self.others(super().propose(bonus, requests, *how), slice(1, None, 3))

    def others(self, drafted: Tensor | SampledBlocks, places: slice) -> Tensor | SampledBlocks:
        """The drafts, and what they were drawn from, with other tokens at these places."""
        size = self.model.config.vocab_size
        if isinstance(drafted, SampledBlocks):
            after = slice(places.start - 1, None, places.step)
            drafted.candidates[:, after] = (drafted.candidates[:, after] + 1) % size
        tokens = drafted.tokens if isinstance(drafted, SampledBlocks) else drafted
        tokens[..., places] = (tokens[..., places] + 1) % size
        return drafted


def other_tokens(_module: Any, _args: Any, output: Any) -> None:
    """Other tokens of the target in a third of the positions: a hook of its logits."""
    logits = output.next_token_logits
    if logits is not None:
        logits[::3] = logits[::3].roll(1, dims=-1)


def disagreeing(target_worker: Any) -> Extension:
    """Every rank but the first gets other tokens of the target, and other drafts."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank == 0:
        return Extension()
    for module in target_worker.model_runner.model.modules():
        if isinstance(module, LogitsProcessor):
            module.register_forward_hook(other_tokens)
    return Extension(make_drafter=OtherDrafts)


class NoHostLengths(StepObserver):
    def before_step(self, batch: Any, step: Step) -> None:
        assert batch.seq_lens_cpu is None and batch.seq_lens_sum is None


def no_host_lengths(target_worker: Any) -> Extension:
    """The target's attention backend needs no lengths on the host, so that SGLang copies none to
    it, as with FlashAttention on a GPU."""
    from sglang_dflash.plugins.platform_cpu.attention import CpuAttentionBackend

    del target_worker
    CpuAttentionBackend.needs_cpu_seq_lens = False
    return Extension(observer=NoHostLengths())


class SlowDrafts(OtherDrafts):
    """Blocks that take many times as long as their verification, with one draft that may be
    right."""

    def propose(self, bonus: Tensor, requests: RequestSlots, *how: Any) -> Any:
        time.sleep(0.15)
        return self.others(Drafter.propose(self, bonus, requests, *how), slice(2, None))


def slow_drafts(_target_worker: Any) -> Extension:
    return Extension(make_drafter=SlowDrafts)


def recorded_steps(_target_worker: Any) -> Extension:
    """The drafter's steps are replayed from lists of torch operations: the path of CUDA graphs."""
    return Extension(recorder=OpRecorder)


class RandomWidth(WidthPolicy):
    """Draws every step's width, another one in every rank: 1, 4 and the block size, with runs of
    plain decoding."""

    def __init__(self, verify_block: int) -> None:
        from sglang.srt.runtime_context import get_parallel

        self.widths = (1, 4, verify_block)
        self._random = random.Random(get_parallel().tp_rank)
        self._plain = 0

    def choose(self, rids: Sequence[Hashable], context: int, most: int, undrafted: int = 0) -> int:
        if self._plain == 0 and self._random.random() < 0.05:
            # Longer than hidden states wait.
            self._plain = self._random.choice((3, 20))
        self._plain = max(0, self._plain - 1)
        return 1 if self._plain else self._random.choice(self.widths)


def random_widths(_target_worker: Any) -> Extension:
    return Extension(width_policy=RandomWidth)


def random_widths_of_known_drafts(target_worker: Any) -> Extension:
    return replace(oracle.extension(target_worker), width_policy=RandomWidth)


def random_widths_with_backends(_target_worker: Any) -> Extension:
    """Give each width an attention backend of the target, as on a GPU, so that width 1 is a
    verification, too."""

    def made(target_worker: Any, widths: Sequence[int], _device: Any) -> TargetForwardByWidth:
        return TargetForwardByWidth(target_worker, widths)

    # A process of SGLang's own has one worker.
    build.target_forward = made
    return Extension(width_policy=RandomWidth)
