"""A decode step's requests, and what watches decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted


class Step(NamedTuple):
    """One decode step's requests.

    Attributes:
        rows: int64 `[R]`, rows of SGLang's request-to-token table.
        seq_lens: int64 `[R]`, committed tokens before the step.
        positions: int64 `[R, W]`, of the tokens that the target computes.
        slots: int64 `[R, W]`, their target KV slots.
        takes_one_token: R; which requests take one token, as `takes_one_token` tells.
        ends: int64 `[R]`: each request has KV slots for the positions below, the others are
            computed in SGLang's padding slot. None if there are slots for all.
    """

    rows: Tensor
    seq_lens: Tensor
    positions: Tensor
    slots: Tensor
    takes_one_token: Sequence[bool]
    ends: Tensor | None = None

    @property
    def width(self) -> int:
        """W, tokens per request that the target computes: 1 to `verify_block`."""
        return self.positions.shape[1]

    @property
    def verified_tokens(self) -> Tensor:
        """Tokens that each request can take, the bonus token included: int32 `[R]` on the host."""
        counts = [1 if is_single else self.width for is_single in self.takes_one_token]
        return torch.tensor(counts, dtype=torch.int32)


class StepObserver:
    """Watches decode steps. Does nothing; derive from it.

    `batch` is SGLang's ScheduleBatch; `batch.reqs` are the requests in row order.
    """

    def before_step(self, batch: Any, step: Step) -> None:
        """Before the block is proposed."""

    def after_step(self, batch: Any, step: Step, accepted: Accepted, new_seq_lens: Tensor) -> None:
        """After the step was committed; `new_seq_lens` int64 `[R]` counts its tokens in."""
