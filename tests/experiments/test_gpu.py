"""`python -m experiments gpu`: its parts on a CPU with a tiny draft, what a GPU would run of them
on tensors without memory, and its plan."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import KernelInterface

from experiments import drafters, gpu, runner
from experiments.drafters import TINY, Load
from experiments.traffic import config_of
from sglang_dflash.facts.draft_config import DraftConfig

CPU = torch.device("cpu")


def result_of(argv: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> Any:
    assert runner.main(["gpu", *argv]) == status
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_all_parts_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "REPEATS", 2)
    result = result_of(["--tiny"], capsys)
    parts = result["parts"]
    assert result["failed"] == {} and any("3x200w64 step" in line for line in gpu.table(result))
    attention = parts["check/tiny"]["attention"]
    assert attention["torch"] == "as torch, not recorded"
    assert "runs on cuda, not on cpu" in attention["fa4"]
    assert parts["fold"]["largest_error"] == 0
    for name in ("1x96", "3x200w64"):
        timed = parts[f"phases/tiny/{name}"]
        assert timed["attention"] == "torch" and timed["host_waits"] is None
        assert all(timed[phase]["eager_ms"] > 0 for phase in gpu.PHASES)
        *least, step = (timed[phase]["floor_bytes"] for phase in gpu.PHASES)
        assert step == sum(least)


def fails() -> Any:
    raise RuntimeError("made to fail")


def test_a_part_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    phase = {"floor_bytes": 10**6, "eager_ms": 3.0, "graph_ms": 2.0}
    made_up = {
        "bandwidth": gpu.Part(lambda: {"bytes_per_s": 1e9}),
        "phases/one": gpu.Part(lambda: {"step": dict(phase)}),
        "two": gpu.Part(fails),
        "phases/three": gpu.Part(lambda: {"b": 1}),
    }
    monkeypatch.setattr(gpu, "plan", lambda _: made_up)
    result = result_of(["--tiny"], capsys, status=1)
    assert result["parts"]["phases/one"]["step"] == {**phase, "graph_over_floor": 2.0}
    assert result["parts"]["phases/three"] == {"b": 1}
    assert result["failed"] == {"two": "RuntimeError: made to fail"}
    some = result_of(["--tiny", "--only", "phases/"], capsys)["parts"]
    assert some == {"phases/one": {"step": phase}, "phases/three": {"b": 1}}
    assert runner.main(["gpu", "--only", "nonesuch"]) == 1
    assert capsys.readouterr().err.startswith("gpu: --only: 'nonesuch'; ")


def test_a_backend_that_differs_fails_its_part_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu, "check_attention", broken)
    found = gpu.self_check(DraftConfig.from_dict(TINY), CPU, torch.float32)
    assert found["failed"] == "torch: RuntimeError: an illegal memory access"
    assert "runs on cuda" in found["attention"]["triton"]


def test_lost_tokens_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="1 of 4 tokens of the load are not live"):
        drafters.check_live(torch.tensor([[1, -1], [2, 3]]))


# ---- on a GPU


@pytest.fixture
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], Mock]]:
    """CUDA's runtime and Triton's launches do nothing. The names of the launched kernels, and a
    graph's replay."""
    launched: list[str] = []
    graph = Mock()

    def launcher(kernel: Any, _: Any) -> Any:
        while hasattr(kernel, "fn"):
            kernel = kernel.fn
        return lambda *_, **__: launched.append(kernel.__name__)

    properties = SimpleNamespace(multi_processor_count=132)
    for name, value in {
        "Event": lambda enable_timing: Mock(elapsed_time=lambda _: 2.0),
        "Stream": Mock,
        "CUDAGraph": lambda: graph,
        "graph": lambda _, pool: contextlib.nullcontext(),
        "stream": contextlib.nullcontext,
        "current_stream": Mock,
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda: None,
        "set_sync_debug_mode": lambda _: None,
        "mem_get_info": lambda _: (100 << 30, 140 << 30),
        "get_device_properties": lambda _: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
    monkeypatch.setattr(drafters, "check_live", lambda _: None)
    with FakeTensorMode():
        yield launched, graph.replay


def test_phases_on_a_gpu(
    made_up_gpu: tuple[list[str], Mock], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, replay = made_up_gpu
    monkeypatch.setattr(gpu, "REPEATS", 2)
    cuda, config = torch.device("cuda"), config_of("z-lab/Qwen3-8B-DFlash-b16")
    assert gpu.copy_bandwidth(cuda) == 2 * (1 << 30) / 0.002
    found = gpu.phases(config, Load(2, 8192, 4096), cuda, torch.bfloat16)
    assert found["attention"] == "triton" and found["host_waits"] is None
    assert {found[phase]["graph_ms"] for phase in gpu.PHASES} == {2.0}
    # Three phases; two recordings in every step, one step of which is not timed.
    assert replay.call_count == 5 * (3 + gpu.REPEATS) + 2
    assert {"block_attention_kernel", "accept_kernel", "write_context_kernel"} <= set(launched)


def test_what_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert gpu.waits_for_the_device(fails) == "made to fail"
    assert gpu.waits_for_the_device(lambda: 0) is None
    assert modes == ["error", "default"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_names_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["gpu"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("gpu: --tiny: False; torch finds no GPU") and "--dry-run" in error


def test_the_plan_is_printed_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    plan = result_of(["--dry-run"], capsys)["parts"]
    assert len([name for name in plan if name.startswith("phases/")]) == len(gpu.SHAPES) * len(
        gpu.LOADS
    )
    # lm_head, layers and context of Qwen3-8B's draft at 1 x 4k, in bfloat16.
    floor = plan["phases/Qwen3-8B-DFlash-b16/1x4096"]["floor_bytes"]["propose"]
    assert 2 * 151936 * 4096 < floor < 4e9
