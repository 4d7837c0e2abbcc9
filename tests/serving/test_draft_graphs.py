"""Which batch sizes of draft steps are recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context

from sglang_dflash.serving.gpu.graphs import (
    CudaGraphRecorder,
    captured_sizes,
    cuda_recorder,
    largest_recorded,
)


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


def test_the_largest_recorded_batch(sizes: Any) -> None:
    assert largest_recorded(20, True) == 16 and largest_recorded(20, False) == 0


@pytest.mark.parametrize(
    ("device", "capturable", "target_has", "expected"),
    [
        ("cpu", True, True, None),
        ("cuda", False, True, None),
        ("cuda", True, False, None),
        ("cuda", True, True, CudaGraphRecorder),
    ],
)
def test_steps_are_captured_if_the_targets_are(
    device: str, capturable: bool, target_has: bool, expected: type | None, sizes: Any
) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend

    sizes.backend = "full" if target_has else Backend.DISABLED
    assert cuda_recorder(torch.device(device), capturable) is expected
