"""Hidden states of plain decoding steps reach the drafter before their slots can be another's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.drafting.options import MOST_WAITING_STEPS
from sglang_dflash.drafting.pending_context import PendingContext


class Waiting(PendingContext):
    """Pending context whose drafter keeps the calls of `absorb`."""

    def __init__(self) -> None:
        drafter: Any = SimpleNamespace(absorb=self._keep)
        super().__init__(drafter, MOST_WAITING_STEPS)
        self.calls: list[tuple[list[float], list[int], list[int]]] = []

    def _keep(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        self.calls.append((hidden[:, 0].tolist(), positions.tolist(), slots.tolist()))


def add(context: PendingContext, requests: list[str], step: int) -> Tensor:
    rows = len(requests)
    hidden = torch.full((rows, 3), float(step))
    positions = torch.full((rows, 1), step)
    context.add(requests, hidden, positions, positions * 10 + torch.arange(rows)[:, None])
    return hidden


def test_steps_wait_and_are_absorbed_in_order() -> None:
    context = Waiting()
    for step in range(3):
        add(context, ["a", "b"], step)
    assert not context.calls
    context.absorb()
    context.absorb()
    assert context.calls == [([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2], [0, 1, 10, 11, 20, 21])]


def test_a_captured_graph_may_overwrite_its_hidden_states() -> None:
    context = Waiting()
    add(context, ["a"], 5).fill_(-1)
    context.absorb()
    assert context.calls[0][0] == [5]


def test_another_batch_does_not_wait() -> None:
    """A request that has ended frees its slots, and one of the others may get them."""
    context = Waiting()
    add(context, ["a", "b"], 1)
    add(context, ["b"], 2)
    assert [call[0] for call in context.calls] == [[1, 1]]
    add(context, ["c"], 3)
    assert [call[0] for call in context.calls] == [[1, 1], [2]]


def test_no_more_than_a_few_steps_wait() -> None:
    context = Waiting()
    for step in range(MOST_WAITING_STEPS):
        add(context, ["a"], step)
    assert [len(call[0]) for call in context.calls] == [MOST_WAITING_STEPS]


def test_an_emptied_cache_gets_nothing() -> None:
    context = Waiting()
    add(context, ["a"], 1)
    context.clear()
    context.absorb()
    assert not context.calls
