"""The head of DFlash v1, and what another head may override."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.drafting.heads.head import Around, DraftHead, TargetHead, by_request, unchanged
from sglang_dflash.drafting.noise import PLAIN, RULES, BlockNoise, LogitScale
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.parallel import (
    TensorParallel,
    argmax_of_shards,
    largest_of_ranks,
    taken_of_shards,
)
from sglang_dflash.drafting.random_inputs import Cases, RandomInputs

# (kernel, its shape ...) -> bytes of one launch, by the `traffic` of `dflash_kernels.KERNEL`.
KernelBytes = Callable[..., int]


class HeadModule(nn.Module):
    """The part of a draft network that is its head's. In drafts of v1 it has no weights.

    Another head is a subclass. Its parameters have the names and shapes of
    `HeadConfig.tensors`, and are whole on every rank. A matrix is an `nn.Linear` that is called:
    on a CPU its weight is packed. What it computes for a proposal is recorded in CUDA graphs: it
    reads nothing on the host.

    Args:
        tp: this rank of the group that the network is split over.
        ops: the fused operations of the network.
    """

    def __init__(self, config: DraftConfig, tp: TensorParallel, ops: TorchOps) -> None:
        super().__init__()
        self.config, self.tp, self.ops = config, tp, ops
        self.scale = LogitScale(config.output_multiplier, config.final_logit_softcapping)

    def around(self, layer: int) -> tuple[Around, Around]:
        """Return what stands around attention and around the MLP of a layer, by its number."""
        return unchanged, unchanged

    def over(self, target: TargetHead) -> DraftHead:
        """The head over an embedding and lm_head."""
        return ArgmaxHead(target, self.tp, self.ops, self.scale)

    def check_cases(self, draw: RandomInputs, requests: int, block: int) -> Cases:
        """The fused operations that only this head has, on random inputs, for the check at
        start-up: it compares the results of `ops` with torch's.

        Args:
            block: B, tokens of the block that the draft fills.
        """
        return {}

    def timed_ops(
        self, logits: Tensor, bonus: Tensor, noise: BlockNoise, kernel_bytes: KernelBytes
    ) -> dict[str, tuple[Callable[[], object], int]]:
        """Operations that `check-gpu` times, by name, each with the fewest bytes that it moves.

        Args:
            logits: `[R * (B - 1), V]`, of all drafts.
            bonus: int64 `[R]`.
            noise: of R sampled requests.
        """
        return {}


@dataclass(frozen=True)
class ArgmaxHead:
    """The head of DFlash v1: the token of the largest logit, at every position."""

    target: TargetHead
    tp: TensorParallel
    ops: TorchOps
    scale: LogitScale = PLAIN

    def __call__(self, hidden: Tensor, bonus: Tensor, noise: BlockNoise | None) -> Tensor:
        logits, first_id = self.target.logits(hidden[:, 1:].flatten(0, 1)), self.target.first_id
        if noise is None:
            drafted = argmax_of_shards(logits, first_id, self.tp)
            return self.target.tokens(drafted).unflatten(0, (len(hidden), -1))
        token_ids = self.target.token_ids
        best, columns = self.ops.largest(logits, noise, first_id, self.scale, token_ids)
        drafted = largest_of_ranks(best.flatten(), columns.flatten(), self.tp)
        return self.target.tokens(drafted).view(len(RULES), len(hidden), -1)

    def shortfall(
        self, hidden: Tensor, bonus: Tensor, ids: Tensor, noise: BlockNoise | None = None
    ) -> Tensor:
        return by_request(self._gaps, hidden, bonus, ids, noise)

    def _gaps(
        self, hidden: Tensor, _bonus: Tensor, ids: Tensor, noise: BlockNoise | None
    ) -> tuple[Tensor, Tensor]:
        logits = self.target.logits(hidden[:, 1:].flatten(0, 1)).float()
        first_id = self.target.first_id
        if noise is not None:
            tokens = self.target.tokens(torch.arange(logits.shape[1], device=ids.device) + first_id)
            of_requests = logits.unflatten(0, (len(ids), -1))
            logits = noise.scores(of_requests, tokens, scale=self.scale).flatten(0, 1)
        columns = self.target.columns(ids.flatten()) - first_id
        taken = taken_of_shards(logits, columns, self.tp)
        parts = torch.stack((logits.amax(1), logits.abs().amax(1)))
        best, scale = self.tp.all_gather(parts).amax(0)
        return (best - taken).view(ids.shape), scale.amax()
