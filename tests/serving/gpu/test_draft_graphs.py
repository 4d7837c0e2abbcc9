"""Batch sizes of draft steps that are recorded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.model_executor.runner import base_cuda_graph_runner

from sglang_dflash.drafting.draft_counters import DraftCounts
from sglang_dflash.serving.gpu import graphs
from sglang_dflash.serving.gpu.graphs import CudaGraphRecorder, captured_sizes, cuda_recorder
from tests.drafting.test_recording import drafter_of, table
from tests.recording import OpRecorder

RUNNER = base_cuda_graph_runner.__name__


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's, of the target's decode graphs."""
    decode = SimpleNamespace(bs=[8, 16], backend="full")
    graph = SimpleNamespace(
        cuda_graph_bs_decode=None, cuda_graph_config=SimpleNamespace(decode=decode)
    )
    overlap = SimpleNamespace(enable_two_batch_overlap=False)
    execution = SimpleNamespace(graph=graph, overlap=overlap)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: execution)
    return decode


@pytest.mark.parametrize(
    ("most", "expected"), [(4, (4,)), (8, (8,)), (15, (8, 15)), (48, (8, 16))], ids=str
)
def test_the_targets_sizes_are_taken(most: int, expected: tuple[int, ...], sizes: Any) -> None:
    """The largest batch is taken, too, if one of them is larger, as by SGLang's own runner."""
    assert captured_sizes(most) == expected
    pool = SimpleNamespace(req_to_token_pool=SimpleNamespace(size=most), server_args=None)
    with pytest.MonkeyPatch.context() as patch:
        for name, found in (
            ("DllmConfig.from_server_args", None),
            ("get_cuda_graph_batch_size_alignment", 1),
            ("get_exec", runtime_context.get_exec()),
            ("get_flags", SimpleNamespace(capture=SimpleNamespace(enable_torch_compile=False))),
        ):
            patch.setattr(f"{RUNNER}.{name}", lambda *_, found=found, **__: found)
        assert tuple(base_cuda_graph_runner.get_batch_sizes_to_capture(pool)[0]) == expected


def test_all_steps_are_captured_in_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each, ranks exchange the addresses of their all-reduce buffers. Each has a
    memory pool of its own."""
    seen, pools, handles = list[str](), list[int](), itertools.count()

    class Graph:
        def capture_begin(self, pool: int) -> None:
            seen.append("begin")
            pools.append(pool)

        def capture_end(self) -> None:
            seen.append("end")

        def replay(self) -> None:
            seen.append("replay")

    @contextmanager
    def graph_capture(stream: object) -> Iterator[Any]:
        seen.append("open")
        yield SimpleNamespace(stream=stream)
        seen.append("close")

    srt = "sglang.srt."
    for name, given in (
        (srt + "distributed.parallel_state.graph_capture", graph_capture),
        (srt + "distributed.device_communicators.pynccl_allocator.set_graph_pool_id", None),
        (srt + "model_executor.runner_utils.pool.get_or_create_global_graph_capture_stream", None),
        ("torch.cuda.CUDAGraph", Graph),
        ("torch.cuda.graph_pool_handle", lambda: next(handles)),
        ("torch.cuda.synchronize", None),
        ("torch.cuda.empty_cache", None),
    ):
        monkeypatch.setattr(name, given or (lambda *_: None))
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
    group = SimpleNamespace(barrier=lambda: None)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    recorder = CudaGraphRecorder()
    first, second = recorder.record([lambda: seen.append("a"), lambda: seen.append("b")])
    once = [["a", "a", "begin", "a", "end"], ["b", "b", "begin", "b", "end"]]
    assert seen == ["open", *once[0], *once[1], "close"]
    assert first != second
    recorder.record([lambda: None])
    assert pools == [0, 0, 1]


@pytest.mark.parametrize(("free", "recorded"), [(0.9, False), (1.1, True)])
def test_steps_are_not_captured_without_memory(
    free: float, recorded: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's own are not, either. Warm-ups leave nothing in the counters."""
    caplog.set_level("WARNING")
    monkeypatch.setattr(graphs, "CudaGraphRecorder", OpRecorder)
    monkeypatch.setattr(OpRecorder, "free_gib", lambda _: free, raising=False)
    # Not the rows of the table: a decode server has some for requests that are on their way.
    monkeypatch.setattr(graphs, "captured_sizes", lambda most: (1, most))
    drafter = drafter_of(None)
    drafter.counters.add_nonfinite(torch.ones(5, dtype=torch.bool))
    made = graphs.graphed(drafter, OpRecorder(), table(), 2, self_check=False)
    assert (made is not drafter) == recorded
    assert ("without CUDA graphs: 0.90 GiB" in caplog.text) != recorded
    if recorded:
        assert made.describe()["draft_graph_batch_sizes"] == [1, 2]
        drafter.counters.send()
        assert drafter.counters.read() == DraftCounts()


def test_without_sizes_they_are_powers_of_two(sizes: Any) -> None:
    sizes.bs = None
    assert captured_sizes(6) == (1, 2, 4, 6)


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
