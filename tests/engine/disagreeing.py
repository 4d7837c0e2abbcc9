"""An extension of our worker: every rank but the first gets other tokens of the target, and other
drafts, in a third of the positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.serving.step.extension import Extension


class OtherDrafts(Drafter):
    def propose(self, bonus: Tensor, requests: RequestSlots) -> Tensor:
        block = super().propose(bonus, requests)
        block[:, 1::3] = (block[:, 1::3] + 1) % self.model.config.vocab_size
        return block


def other_tokens(_module: Any, _args: Any, output: Any) -> None:
    """After the target has computed its logits."""
    logits = output.next_token_logits
    if logits is not None:
        logits[::3] = logits[::3].roll(1, dims=-1)


def extension(target_worker: Any) -> Extension:
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank == 0:
        return Extension()
    for module in target_worker.model_runner.model.modules():
        if isinstance(module, LogitsProcessor):
            module.register_forward_hook(other_tokens)
    return Extension(make_drafter=OtherDrafts)
