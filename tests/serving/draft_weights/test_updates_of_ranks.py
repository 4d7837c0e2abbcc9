"""New weights for a draft that two ranks share: both take them, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.parallel import TensorParallel
from sglang_dflash.drafting.weights import load_model
from sglang_dflash.serving.draft_weights.updates import DraftWeights, TargetAndDraft
from tests.serving.draft_weights.test_updates import Target, marked, saved


class Rank:
    """The process group of one of two ranks, which are threads. A rank that waits for one that has
    gone on fails."""

    def __init__(self, number: int, values: list[Any], meeting: threading.Barrier) -> None:
        self._number, self._values, self._meeting = number, values, meeting

    def gather(self, gathered: list[Any], own: Any) -> None:
        self._values[self._number] = own
        self._meeting.wait()
        gathered[:] = self._values
        self._meeting.wait()


class TwoRanks:
    """A server's: a target and a draft on each of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        values, meeting = [None, None], threading.Barrier(2, timeout=60)
        monkeypatch.setattr(
            torch.distributed, "all_gather_object",
            lambda gathered, own, group: group.gather(gathered, own),
        )  # fmt: skip
        self.drafts = [
            load_model(folder, dtype=torch.float32, tp=TensorParallel(number, 2))
            for number in range(2)
        ]
        self.targets = [Target(), Target()]
        self._groups = [Rank(number, values, meeting) for number in range(2)]

    def updated(self, update: Callable[[Any, int], Any]) -> list[Any]:
        """Return each rank's answer; `update`: called with its models and its number."""

        def run(number: int) -> Any:
            target = self.targets[number]
            loads = SimpleNamespace(
                update_weights_from_tensor=lambda named_tensors, **_: (
                    target.load_weights(named_tensors) or (True, "")
                ),
                update_weights_from_disk=lambda *_, **__: (False, "no weights are there"),
                update_weights_from_ipc=lambda request: request(target),
            )
            runner = SimpleNamespace(model=target, weight_updater=loads)
            draft = DraftWeights(self.drafts[number], self._groups[number])
            return update(TargetAndDraft(runner, draft, lambda: None), number)

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(run, number) for number in range(2)]
            return [future.exception() or future.result() for future in futures]

    def have(self, new: dict[str, Tensor]) -> list[bool]:
        norm = new["layers.0.self_attn.k_norm.weight"]
        return [torch.equal(draft._k_norms()[0], norm) for draft in self.drafts]


@pytest.fixture
def new(tmp_path: Path) -> dict[str, Tensor]:
    return saved(tmp_path)


@pytest.fixture
def ranks(new: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    return TwoRanks(tmp_path / "old", monkeypatch)


def test_ranks_install_together(ranks: TwoRanks, new: dict[str, Tensor], tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    for answer in ranks.updated(lambda models, _: models.update_weights_from_disk(folder)):
        assert answer == (True, f"Succeeded to update the draft, {len(new)} tensors.")
    assert ranks.have(new) == [True, True]


def test_a_folder_that_a_node_lacks(
    ranks: TwoRanks, new: dict[str, Tensor], tmp_path: Path
) -> None:
    """The others do not wait for it."""
    folders = [str(tmp_path / "new"), str(tmp_path / "nonesuch")]
    for answer in ranks.updated(lambda m, number: m.update_weights_from_disk(folders[number])):
        assert not answer[0] and "nonesuch" in answer[1] and answer[1].endswith("unchanged")
    assert ranks.have(new) == [False, False]


def test_tensors_that_a_rank_is_not_given(ranks: TwoRanks, new: dict[str, Tensor]) -> None:
    every = list(marked(new).items())
    for sent, told in (
        (every[-1:], "ranks were given different tensors of the draft. The weights are unchanged"),
        ([("draft.fc.weight", torch.zeros(2)), *every[1:]], "fc.weight of the draft: [2]"),
    ):
        given = [every, sent]
        answers = ranks.updated(
            lambda m, number, given=given: m.update_weights_from_tensor(given[number])
        )
        assert all(not success and told in message for success, message in answers)
        assert not any(target.given for target in ranks.targets)
    assert ranks.have(new) == [False, False]


def test_a_target_that_fails_on_a_rank(ranks: TwoRanks, new: dict[str, Tensor]) -> None:
    ranks.targets[1].fails = True
    sent = list(marked(new).items())
    first, second = ranks.updated(lambda models, _: models.update_weights_from_tensor(sent))
    assert first == (False, "RuntimeError: the target's") and isinstance(second, RuntimeError)
    assert ranks.have(new) == [False, False]


def test_parts_that_are_wrong_on_a_rank(ranks: TwoRanks, new: dict[str, Tensor]) -> None:
    """A checkpoint engine sends parts that reuse its memory, and reports errors itself."""
    every = marked(new)

    def handed_over(last: dict[str, Tensor]) -> Any:
        def run(target: Target) -> tuple[bool, str]:
            for part in (every, last):
                memory = {name: tensor.clone() for name, tensor in part.items()}
                try:
                    target.load_weights(list(memory.items()))
                except ConfigError as error:
                    return False, str(error)
                for tensor in memory.values():
                    tensor.zero_()
            return True, ""

        return run

    wrong = [handed_over({}), handed_over({"draft.fc.weight": torch.zeros(2)})]
    for success, message in ranks.updated(lambda m, i: m.update_weights_from_ipc(wrong[i])):
        assert not success and "fc.weight of the draft: [2]" in message
    assert ranks.have(new) == [False, False]
    right = handed_over({})
    assert all(a[0] for a in ranks.updated(lambda m, _: m.update_weights_from_ipc(right)))
    assert ranks.have(new) == [True, True]
