"""`sglang-dflash check-gpu`: its parts on a CPU with a tiny draft, what a GPU would run of them on
tensors without memory, and its plan."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import KernelInterface

from sglang_dflash.checkpoint.draft_config import DraftConfig
from sglang_dflash.tools import cli
from sglang_dflash.tools.gpu_check import drafters, timing
from sglang_dflash.tools.gpu_check import parts as parts_of_gpu
from sglang_dflash.tools.gpu_check import plan as plans
from sglang_dflash.tools.gpu_check.drafters import TINY, BenchLoad
from sglang_dflash.tools.gpu_check.floors import config_of
from sglang_dflash.tools.gpu_check.parts import PHASES

CPU = torch.device("cpu")


def parts_in(out: Path, *argv: str, status: int = 0) -> Any:
    """The figures that the command writes."""
    assert cli.main(["check-gpu", "--tiny", *argv, "--out", str(out)]) == status
    return json.loads(out.read_text())["parts"]


def test_all_parts_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(timing, "REPEATS", 2)
    parts = parts_in(tmp_path / "report.json")
    shown = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[0] == "{"]
    assert shown == [{name: figures} for name, figures in parts.items()]
    assert set(parts["kernels/tiny/8"]) == {
        "sample",
        "sample, filtered",
        "sample, drawn",
        "sample, filtered, drawn",
        "penalties",
        "candidates",
        "torch.topk",
        "walk",
        "accept",
        "lookup",
    }
    assert parts["start/tiny"]["first_s"] > 0
    attention = parts["check/tiny"]["attention"]
    assert attention["torch"] == "as torch, not recorded"
    assert "runs on cuda, not on cpu" in attention["fa4"]
    assert parts["fold"]["largest_error"] == 0 and parts["fold"]["snapshot_write_ms"] > 0
    for name in ("1x96", "3x200w64"):
        timed = parts[f"phases/tiny/{name}"]
        assert timed["attention"] == "torch" and timed["host_waits"] is None
        assert all(timed[phase]["eager_ms"] > 0 for phase in PHASES)
        least = {phase: timed[phase]["floor_bytes"] for phase in PHASES}
        assert least["step"] == least["propose"] + least["commit"] + least["absorb"]


def fails() -> Any:
    raise RuntimeError("made to fail")


def test_a_part_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    phase = {"floor_bytes": 10**6, "eager_ms": 3.0, "graph_ms": 2.0}
    made_up = {
        "bandwidth": plans.CheckPart(lambda: {"bytes_per_s": 1e9}),
        "phases/one": plans.CheckPart(lambda: {"step": dict(phase)}),
        "two": plans.CheckPart(fails),
        "phases/three": plans.CheckPart(lambda: {"b": 1}),
    }
    monkeypatch.setattr(plans, "plan", lambda _: made_up)
    parts = parts_in(out, status=1)
    assert parts["phases/one"]["step"] == {**phase, "graph_over_floor": 2.0}
    assert parts["phases/three"] == {"b": 1}
    assert parts["two"] == {"failed": "RuntimeError: made to fail"}
    assert capsys.readouterr().err.endswith("check-gpu: two: RuntimeError: made to fail\n")
    named = parts_in(out, "--only", "phases/")
    assert list(named) == ["bandwidth", "phases/one", "phases/three"]
    assert named["phases/one"]["step"]["graph_over_floor"] == 2.0
    out.unlink()
    capsys.readouterr()
    assert cli.main(["check-gpu", "--tiny", "--only", "nonesuch", "--out", str(out)]) == 1
    assert capsys.readouterr().err.startswith("sglang-dflash: --only: 'nonesuch'; no part; they ")
    assert not out.exists()


def test_what_is_done_is_kept_if_the_command_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ended() -> Any:
        raise SystemExit(143)

    made_up = {
        "bandwidth": plans.CheckPart(lambda: {"bytes_per_s": 1e9}),
        "one": plans.CheckPart(lambda: {"a": 1}),
        "two": plans.CheckPart(ended),
    }
    monkeypatch.setattr(plans, "plan", lambda _: made_up)
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit):
        cli.main(["check-gpu", "--tiny", "--out", str(out)])
    kept = json.loads(out.read_text())
    assert kept["parts"] == {"bandwidth": {"bytes_per_s": 1e9}, "one": {"a": 1}}


@pytest.mark.parametrize(
    ("error", "times", "failed"),
    [
        # Of a replay, of writing snapshots, and of copying the accepted ones.
        (0.0, [3.0, 2.0, 1.5], None),
        (0.0, [3.6, 2.0, 1.5], "replay is slower than snapshots"),
        (1.0, [1.0, 2.0, 1.5], "it differs from torch"),
    ],
)
def test_replay_is_compared_with_what_it_saves(
    error: float, times: list[float], failed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_kernels import gated_delta_fold

    def kernel(_: Any, states: torch.Tensor, *__: Any) -> None:
        replayed(_, states, *__)
        states.mul_(1 + error)

    replayed = parts_of_gpu.torch_fold_
    monkeypatch.setattr(gated_delta_fold, "fold_", kernel)
    monkeypatch.setattr(parts_of_gpu, "milliseconds", lambda *_: times.pop(0))
    device: Any = SimpleNamespace(type="cuda")
    made = parts_of_gpu._recorded_verify
    monkeypatch.setattr(parts_of_gpu, "_recorded_verify", lambda _, *of: made(CPU, *of))
    found = plans.fold(device, torch.bfloat16, 2, 4, 2, 1, 16)
    assert found.get("failed", "").startswith(failed or "") and ("failed" in found) == bool(failed)


def test_a_backend_that_differs_fails_its_part_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(parts_of_gpu, "check_attention", broken)
    found = plans.self_check(DraftConfig.from_dict(TINY), CPU, torch.float32)
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
        "empty_cache": lambda: None,
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
    monkeypatch.setattr(timing, "REPEATS", 2)
    cuda, config = torch.device("cuda"), config_of("z-lab/Qwen3-8B-DFlash-b16")
    assert plans.copy_bandwidth(cuda) == 2 * (1 << 30) / 0.002
    found = plans.phases(config, BenchLoad(2, 8192, 4096), cuda, torch.bfloat16)
    assert found["attention"] == "triton" and found["host_waits"] is None
    assert {found[phase]["graph_ms"] for phase in PHASES} == {2.0}
    # Four phases; two recordings in every step, one step of which is not timed.
    assert replay.call_count == 6 * (3 + timing.REPEATS) + 2
    assert {"block_attention_kernel", "accept_kernel", "write_context_kernel"} <= set(launched)


def test_kernels_and_a_start_on_a_gpu(
    made_up_gpu: tuple[list[str], Mock], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, _ = made_up_gpu
    monkeypatch.setattr(timing, "REPEATS", 2)
    monkeypatch.setattr(parts_of_gpu, "RECORDED", (1, 2))
    cuda, config = torch.device("cuda"), config_of("z-lab/Qwen3.8-27B-DFlash2")
    found = plans.time_kernels(config, 64, cuda, torch.bfloat16)
    assert set(found) == {
        "sample", "sample, filtered", "sample, drawn", "sample, filtered, drawn", "penalties",
        "accept", "lookup", "candidates", "torch.topk", "walk",
    }  # fmt: skip
    assert found["candidates"]["floor_bytes"] == 64 * 7 * 248320 * 2
    assert all(of["graph_ms"] == 2.0 for of in found.values())
    launched.clear()
    found = plans.start(config, cuda, torch.bfloat16)
    assert set(found) == {"first_s", "first_mib", "again_s", "again_mib"}
    assert "block_attention_kernel" in launched


def test_what_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert timing.waits_for_the_device(fails) == "made to fail"
    assert timing.waits_for_the_device(lambda: 0) is None
    assert modes == ["error", "default"] * 2


def test_the_plan_is_printed_anywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["check-gpu", "--dry-run"]) == 0
    parts: dict[str, dict[str, int]] = {}
    for line in capsys.readouterr().out.splitlines():
        parts |= json.loads(line)
    assert list(parts) == list(plans.plan(tiny=False)) and not list(tmp_path.iterdir())
    # lm_head, layers and context of Qwen3-8B's draft at 1 x 4k, in bfloat16.
    floor = parts["phases/Qwen3-8B-DFlash-b16/1x4096"]["propose"]
    assert 2 * 151936 * 4096 < floor < 4e9


def test_it_needs_no_sglang() -> None:
    code = "import sys; sys.modules['sglang'] = None; import sglang_dflash.tools.gpu_check.plan"
    subprocess.run([sys.executable, "-c", code], check=True)
