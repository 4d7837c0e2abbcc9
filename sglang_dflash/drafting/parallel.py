"""Tensor parallelism as a value: rank, size and two collectives. No process group is known here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dflash.common.errors import ConfigError


@dataclass(frozen=True)
class TensorParallel:
    """A rank in a tensor-parallel group. The default is a group of one.

    Attributes:
        rank, size: this rank, and the number of ranks.
        all_reduce: the sum of a tensor over the ranks.
        all_gather: all ranks' tensors `[...]`, stacked as `[size, ...]`.
        from_first: a number of rank 0, on all ranks. On the host: no device is waited for.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = lambda x: x
    all_gather: Callable[[Tensor], Tensor] = lambda x: x[None]
    from_first: Callable[[int], int] = lambda number: number

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("tp_size", self.size, "a positive number of ranks is required")


def argmax_of_shards(logits: Tensor, first_id: int, tp: TensorParallel) -> Tensor:
    """Ids of the largest logits of a vocabulary that is split over ranks.

    Of equal logits the one on the lowest rank is taken. NaN counts as the largest of all.

    Args:
        logits: `[N, V / size]`, this rank's part of the vocabulary.
        first_id: the id of its first column.

    Returns:
        int64 `[N]`; -1 for rows whose largest logit is not finite.
    """
    value, index = logits.max(-1)
    ids = index + first_id
    if tp.size == 1:
        return torch.where(value.isfinite(), ids, -1)
    # Ids below 2 ** 24 are exact in float32, so one gather carries values and ids.
    candidates = tp.all_gather(torch.stack((value.float(), ids.float())))
    best = candidates[:, 0].argmax(0, keepdim=True)
    value, ids = (candidates[:, i].gather(0, best)[0] for i in (0, 1))
    return torch.where(value.isfinite(), ids.long(), -1)


def candidates_of_ranks(values: Tensor, ids: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """The largest of what each rank has, and their ids, in descending order. Of equal ones those
    on lower ranks come first.

    Args:
        values: `[N, K]`, in descending order.
        ids: int64 `[N, K]`, below 2 ** 24.

    Returns:
        `[N, K]` each.
    """
    if tp.size == 1:
        return values, ids
    # As for `argmax_of_shards`, in one gather.
    values, all_ids = tp.all_gather(torch.stack((values.float(), ids.float()))).transpose(0, 1)
    values, best = values.transpose(0, 1).flatten(1).sort(dim=-1, descending=True, stable=True)
    best = best[:, : ids.shape[1]]
    # A kernel reads dense rows.
    values = values[:, : ids.shape[1]].contiguous()
    return values, all_ids.transpose(0, 1).flatten(1).gather(1, best).long()


def taken_of_shards(logits: Tensor, columns: Tensor, tp: TensorParallel) -> Tensor:
    """The logits of one column each, of a vocabulary that is split over ranks.

    Args:
        logits: `[N, V / size]`, this rank's part.
        columns: int64 `[N]`, of this part; what is outside is another rank's.

    Returns:
        float32 `[N]`; -inf for a column that no rank has.
    """
    in_shard = (columns >= 0) & (columns < logits.shape[1])
    taken = logits.gather(1, columns.where(in_shard, 0)[:, None])[:, 0].float()
    return tp.all_gather(taken.where(in_shard, -torch.inf)).amax(0)
