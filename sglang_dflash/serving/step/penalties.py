"""Penalties at every position of a drafted block, as plain decoding would apply them there.

A penalty depends on the output before a position. For a drafted position, that is the committed
output and the drafts before it: if one of these is rejected, what the target says at the position
is not used. So all positions of a block are penalized at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.penalties import Penalties, Penalty, Stops
from sglang_dflash.serving.step import sampling
from sglang_dflash.serving.step.batch import ScheduleBatch, record_stream
from sglang_dflash.serving.step.penalty_counts import LENGTH, PENALIZERS


class BlockPenalties:
    """The penalties of a step, and what a step commits until the next one counts it."""

    def __init__(self, rows: int, verify_block: int, device: torch.device, ops: TorchOps) -> None:
        """
        Args:
            rows: of SGLang's request-to-token table.
            ops: penalize a block.
        """
        self._tokens = torch.zeros(rows, verify_block, dtype=torch.int64, device=device)
        self._lengths = torch.ones(rows, dtype=torch.int64, device=device)
        self._ops = ops
        self._orchestrator: Any = None

    def warm_up(self, vocab_size: int) -> None:
        """Let the kernel be compiled for the target's logits, before a request needs it."""
        logits = torch.zeros(1, 2, vocab_size, device=self._tokens.device)
        neutral = Penalty(logits[:, 0].clone(), torch.zeros_like(logits[:, 0, :1]))
        block = torch.zeros_like(logits[:, :, 0], dtype=torch.int64)
        self._ops.penalize(logits, block, Penalties(presence=neutral))

    def commit(self, batch: ScheduleBatch, tokens: Tensor, lengths: Tensor | None = None) -> None:
        """Remember what a step commits, if a request of the batch has penalties.

        Args:
            tokens: int `[R, W]`, the committed ones first. SGLang's sampler gives int32.
            lengths: int64 `[R]`, how many are committed, 1 to W. None for one each.
        """
        info = batch.sampling_info
        if info is not None and sampling.has_penalties(info):
            rows = batch.req_pool_indices.long()
            self._tokens[rows, : tokens.shape[1]] = tokens.long()
            if lengths is None:
                self._lengths.index_fill_(0, rows, 1)
            else:
                self._lengths[rows] = lengths

    def newest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of each request's last step, int64 `[R, verify_block]`, and a
        mask of the committed ones, bool of that shape."""
        tokens, lengths = self._tokens[rows], self._lengths[rows, None]
        return tokens, torch.arange(tokens.shape[1], device=tokens.device) < lengths

    def begin(self, orchestrator: Any) -> None:
        """Begin a decode step whose penalties SGLang's `orchestrator` has counted."""
        self._orchestrator = orchestrator

    def apply(self, logits: Tensor, block: Tensor) -> None:
        """Penalize the positions after the first, in place.

        Args:
            logits: `[R, W, V]`, as the target computed them.
            block: int64 `[R, W]`, the last step's bonus token, then the drafted tokens.

        Raises:
            RuntimeError: `begin` was not called in this step.
        """
        orchestrator, self._orchestrator = self._orchestrator, None
        if orchestrator is None:
            raise RuntimeError("a block's penalties were not counted before its forward")
        self._ops.penalize(logits, block, _penalties_of(orchestrator))


def _penalties_of(orchestrator: Any) -> Penalties:
    """Read the penalties from SGLang's penalizers."""
    prepared = {
        type(penalizer).__name__: penalizer
        for penalizer in orchestrator.penalizers.values()
        if penalizer.is_prepared()
    }

    def fields(name: str, *names: str) -> tuple[Tensor, ...] | None:
        if name not in prepared:
            return None
        tensors = tuple(getattr(prepared[name], field) for field in names)
        for tensor in tensors:
            # The scheduler may replace it before the device has read it.
            record_stream(tensor)
        return tensors

    def penalty(name: str) -> Penalty | None:
        tensors = fields(name, PENALIZERS[name].counts, PENALIZERS[name].penalty)
        return None if tensors is None else Penalty(*tensors)

    stops = fields("BatchedMinNewTokensPenalizer", "stop_token_penalties", "min_new_tokens", LENGTH)
    return Penalties(
        penalty("BatchedFrequencyPenalizer"),
        penalty("BatchedPresencePenalizer"),
        penalty("BatchedRepetitionPenalizer"),
        None if stops is None else Stops(*stops),
    )
