"""Which batch sizes of draft steps are recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context

from sglang_dflash.serving.gpu.graphs import AUTO, OFF, RECORDED, captured_sizes, largest_recorded

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's, of the target's decode graphs."""
    decode = SimpleNamespace(bs=[8, 16], backend="full")
    graph = SimpleNamespace(
        cuda_graph_bs_decode=None, cuda_graph_config=SimpleNamespace(decode=decode)
    )
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(graph=graph))
    return decode


@pytest.mark.parametrize(
    ("most", "expected"), [(4, (4,)), (8, (8,)), (15, (8,)), (48, (8, 16))], ids=str
)
def test_the_targets_sizes_are_taken(most: int, expected: tuple[int, ...], sizes: Any) -> None:
    """If all of them are larger than any batch, the largest batch."""
    assert captured_sizes(most) == expected


def test_without_sizes_they_are_powers_of_two(sizes: Any) -> None:
    sizes.bs = None
    assert captured_sizes(6) == (1, 2, 4, 6)


@pytest.mark.parametrize(
    ("asked", "device", "capturable", "expected"),
    [
        (OFF, CUDA, True, 0),
        (AUTO, CPU, True, 0),
        (AUTO, CUDA, False, 0),
        (AUTO, CUDA, True, 16),
        (RECORDED, CPU, False, 16),
    ],
)
def test_the_largest_recorded_batch(
    asked: str, device: torch.device, capturable: bool, expected: int, sizes: Any
) -> None:
    assert largest_recorded(asked, device, capturable, 20) == expected


def test_none_is_recorded_if_the_targets_are_not(sizes: Any) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend

    sizes.backend = Backend.DISABLED
    assert largest_recorded(AUTO, CUDA, True, 20) == 0
