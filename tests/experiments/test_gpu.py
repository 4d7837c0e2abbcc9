"""`python -m experiments gpu`: its parts on a CPU with a tiny draft, what a GPU would run of them
on tensors without memory, its state and its plan."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import KernelInterface

from experiments import (
    device,
    drafters,
    gpu,
    gpu_checks,
    gpu_loops,
    gpu_phases,
    gpu_servers,
    runner,
)
from experiments.drafters import TINY, Load
from experiments.gpu_servers import levels_of
from sglang_dflash.bench.measure import Run
from sglang_dflash.facts.draft_config import DraftConfig
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of a run; a timed run is short."""
    monkeypatch.setattr(gpu_phases, "REPEATS", 2)
    return tmp_path / "state.json"


def tiny(state: Path, *others: str) -> list[str]:
    return ["gpu", "--device", "cpu", "--size", "tiny", "--state", str(state), *others]


def result_of(argv: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> Any:
    assert runner.main(argv) == status
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_all_parts_on_a_cpu(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(tiny(state)) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    parts, no_pair = result["parts"], "no checkpoint is given: --target and --draft"
    assert result["failed"] == {}
    assert result["skipped"] == {f"server/{arm}": no_pair for arm in ("plain", "ours", "builtin")}
    attention = parts["check/tiny"]["attention"]
    assert attention["torch"] == "as torch, recorded as eager"
    assert "runs on cuda, not on cpu" in attention["flashinfer"]
    assert parts["demo_draft_against_cpu"]["float32"] == {"largest_error": 0, "equal_tokens": 1}
    assert parts["fold"]["largest_error"] == 0
    assert parts["loop"]["identical"] == parts["loop"]["of"] == 2
    assert parts["large_pair_loop"]["new_tokens"] == 4
    for name in ("1x96", "3x200w64"):
        timed = parts[f"phases/tiny/{name}"]
        assert timed["attention"] == "torch" and timed["host_waits"] is None
        for part in (*gpu_phases.PHASES, "step"):
            figures = timed[part]
            assert figures["eager_ms"] > 0 and figures["graph_ms"] > 0
            expected = 1000 * figures["floor_bytes"] / parts["bandwidth"]["bytes_per_s"]
            assert figures["floor_ms"] == pytest.approx(expected, abs=1e-5)
        assert timed["step"]["floor_bytes"] == sum(
            timed[part]["floor_bytes"] for part in gpu_phases.PHASES
        )
    assert set(result["goals"]["step_over_floor_at_batch_1"]) == {"tiny/1x96"}
    assert any(line.startswith("tiny/3x200w64") and " step" in line for line in lines)
    assert set(json.loads(state.read_text())["parts"]) == set(parts) - set(result["skipped"])


def only(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """A plan of these parts."""
    listed = [gpu.Part(name, 100, run) for name, run in parts.items()]
    monkeypatch.setattr(gpu, "plan", lambda _: listed)


def fails(_: Any) -> Any:
    raise RuntimeError("made to fail")


def test_a_run_goes_on_after_the_finished_parts(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, one=lambda _: {"a": 1}, two=fails, three=lambda done: {"b": done["one"]["a"]})
    result = result_of(tiny(state), capsys, status=1)
    assert result["parts"]["three"] == {"b": 1}
    assert result["failed"] == {"two": "RuntimeError: made to fail"}
    only(monkeypatch, one=fails, two=lambda done: {"c": done["one"]["a"]}, three=fails)
    result = result_of(tiny(state), capsys)
    assert result["parts"] == {"one": {"a": 1}, "two": {"c": 1}, "three": {"b": 1}}


def test_what_would_end_too_late_is_not_begun(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, one=fails)
    result = result_of(tiny(state, "--minutes", "1"), capsys)
    assert result["skipped"] == {"one": "about 100 s, 60 s are left"} and not state.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"setup": {"device": "cuda"}, "parts": {}}',
            "is of a run with accept None, this one has",
        ),
        ("[]", "is not a state of this experiment"),
        ("{", "is not a state of this experiment"),
    ],
)
def test_a_state_of_another_run_is_refused(
    content: str, message: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state.write_text(content)
    assert runner.main(tiny(state)) == 1
    assert message in capsys.readouterr().err and state.read_text() == content


def test_a_backend_that_differs_fails_its_part_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu_checks, "check_recording", broken)
    found = gpu_checks.self_check(DraftConfig.from_dict(TINY), CPU, torch.float32)
    assert found["failed"] == "torch: RuntimeError: an illegal memory access"
    assert "runs on cuda" in found["attention"]["triton"]


def test_lost_tokens_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="1 of 4 tokens of the load are not live"):
        drafters.check_live(torch.tensor([[1, -1], [2, 3]]))


# ---- on a GPU


class Event:
    """In place of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, _: Event) -> float:
        return 2.0


class Stream:
    def wait_stream(self, _: Stream) -> None:
        pass


class Graph:
    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """CUDA's runtime and Triton's launches do nothing. The names of the launched kernels."""
    launched: list[str] = []

    @contextlib.contextmanager
    def graph(_: Graph, pool: Any) -> Iterator[None]:
        yield

    def launcher(kernel: Any, _: Any) -> Any:
        while hasattr(kernel, "fn"):
            kernel = kernel.fn
        return lambda *_, **__: launched.append(kernel.__name__)

    properties = SimpleNamespace(multi_processor_count=132)
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": graph,
        "stream": contextlib.nullcontext,
        "current_stream": Stream,
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
        yield launched


@pytest.mark.parametrize("load", [Load(2, 4096, None), Load(2, 8192, 4096)], ids=lambda x: x.name)
def test_phases_on_a_gpu(
    load: Load, made_up_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_phases, "REPEATS", 2)
    cuda, config = torch.device("cuda"), gpu.configs("published")["Qwen3.5-27B-DFlash"]
    bandwidth = device.copy_bandwidth(cuda)
    assert bandwidth == 2 * (1 << 30) / 0.002
    Graph.replays = 0
    found = gpu_phases.time_load(config, load, cuda, torch.bfloat16, bandwidth)
    assert found["attention"] == "triton" and found["host_waits"] is None
    assert {found[part]["graph_ms"] for part in (*gpu_phases.PHASES, "step")} == {2.0}
    # Three phases, and two recordings in every step.
    assert Graph.replays == 5 * (3 + gpu_phases.REPEATS)
    assert {"block_attention_kernel", "accept_kernel", "write_context_kernel"} <= set(made_up_gpu)


def test_a_load_that_does_not_fit_is_skipped(
    made_up_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 140 << 30))
    found = gpu_phases.time_load(
        gpu.configs("published")["Qwen3-8B-DFlash-b16"], Load(48, 32768, None),
        torch.device("cuda"), torch.bfloat16, 1e12,
    )  # fmt: skip
    assert found == {"skipped": "needs 33.1 GiB, 1.0 GiB are free"} and not made_up_gpu


def test_what_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert device.waits_for_the_device(lambda: fails(0)) == "made to fail"
    assert device.waits_for_the_device(lambda: 0) is None
    assert modes == ["error", "default"] * 2


def test_memory_of_a_load_is_what_is_allocated() -> None:
    config = DraftConfig.from_dict(TINY)
    model = drafters.random_model(config, CPU, torch.float32)
    for load in (Load(3, 200, None), Load(3, 200, 64)):
        one = drafters.loaded(model, drafters.random_head(model), load, "torch", CPU)
        weights = sum(p.nbytes for p in model.parameters()) + 4 * 512 * 64
        expected = drafters.bytes_needed(config, load, 4)
        assert expected == pytest.approx(weights + one.drafter.cache.nbytes, rel=0.02)


def test_without_a_gpu_one_line_names_what_can_be_done(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert runner.main(["gpu", "--state", str(state)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("gpu: --device: cuda, but torch finds no GPU; --dry-run prints")


# ---- the plan, the goals


def test_the_plan_is_printed_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["gpu", "--dry-run"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    plan = json.loads(last)["plan"]
    phases = [name for name in plan if name.startswith("phases/")]
    assert len(phases) == len(gpu.SHAPES) * len(gpu.LOADS)
    # lm_head, layers and context of Qwen3-8B's draft at 1 x 4k, in bfloat16.
    floor = plan["phases/Qwen3-8B-DFlash-b16/1x4096"]["floor_bytes"]["propose"]
    assert 2 * 151936 * 4096 < floor < 4e9
    assert len(lines) == len(plan) + 2
    # With servers, under half an hour.
    assert sum(part["about_s"] for part in plan.values()) + 3 * gpu.SERVER_S < 1800


def test_goals() -> None:
    def step(ms: float, ratio: float) -> dict[str, Any]:
        return {"step": {"graph_ms": ms, "graph_over_floor": ratio}}

    timed = {
        "A/1x4096w4096": step(1.0, 1.2),
        "A/1x131072w4096": step(1.03, 1.25),
        "A/32x131072w4096": step(3, 2),
        "B/1x4096w4096": {"skipped": "no"},
        "B/1x131072w4096": {"step": {"eager_ms": 1}},
    }
    found = gpu_phases.goals(timed)
    assert found["step_over_floor_at_batch_1"] == {"A/1x4096w4096": 1.2, "A/1x131072w4096": 1.25}
    assert found["step_at_128k_over_4k"] == {"A/1x131072w4096": 1.03}


# ---- servers


PAIR = demo_pair("dense")


def pair(**changes: Any) -> gpu_servers.Pair:
    given = {"target": str(PAIR.target), "draft": str(PAIR.draft), "levels": "1x16,4x8"}
    return gpu.Options(**given, new_tokens=32, flags="--max-total-tokens 4096", **changes).pair()


def test_arms_are_three_servers() -> None:
    plain, ours, builtin = (pair(draft_flags="--x 1").arm(name) for name in gpu_servers.ARMS)
    assert plain.env == {} and "--speculative-algorithm" not in plain.flags
    assert ours.env == builtin.env == {"SGLANG_SIMULATE_ACC_LEN": "4.0"}
    assert dict(builtin.flags) == {**ours.flags, "--speculative-dflash-worker": "builtin"}
    assert plain.args()[-2:] == ["--max-total-tokens", "4096"]
    assert ours.args()[-4:] == ["--max-total-tokens", "4096", "--x", "1"]


@pytest.mark.parametrize("text", ["", "1", "1x", "0x5", "1x2x3", "ax4"])
def test_wrong_levels_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--levels"):
        levels_of(text)


@pytest.mark.parametrize("missing", ["sglang", "requests"])
def test_servers_are_skipped_without_their_packages(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert pair().obstacle() == f"{missing} cannot be imported"


class FakeServer:
    """In place of `Server`: 10 ms for a prefill, 5 ms for each step of 4 tokens."""

    def __init__(self, config: Any, timeout_s: float) -> None:
        self.drafts = "--speculative-algorithm" in config.flags

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def dflash(self) -> dict[str, Any]:
        return {"draft_attention": "triton", "counts": 5} if self.drafts else {}


def test_servers_are_compared_without_their_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(server: FakeServer, prompts: Any, concurrency: int, new_tokens: int) -> Run:
        assert [len(ids) for ids in prompts] in ([16], [8] * 4)
        steps = (new_tokens - 1) // (4 if server.drafts else 1)
        seconds = 0.01 + 0.005 * steps
        tokens = len(prompts) * new_tokens
        return Run(tokens, seconds, len(prompts) * steps, concurrency, [])

    monkeypatch.setattr("sglang_dflash.bench.server.Server", FakeServer)
    monkeypatch.setattr(gpu_servers.measure, "run", run)
    served = {name: gpu_servers.serve(pair(), name) for name in gpu_servers.ARMS}
    assert served["ours"]["worker"] == {"draft_attention": "triton"}
    assert served["plain"]["1x16"]["decode_tok_s"] == 200
    assert served["plain"]["4x8"]["step_ms"] == served["ours"]["4x8"]["step_ms"] == 5
    assert gpu_servers.ratios(served) == {
        level: {"ours_over_plain": 4.0, "ours_over_builtin": 1.0} for level in ("1x16", "4x8")
    }
    assert gpu_servers.ratios({"plain": served["plain"]}) == {}


def test_the_loops_shapes_are_of_a_pair() -> None:
    for target, draft in (gpu_loops.LARGE_PAIR, gpu_loops.TINY_PAIR):
        config = DraftConfig.from_dict(draft)
        assert (
            config.num_hidden_layers
            and max(draft["dflash_config"]["target_layer_ids"]) < (target["num_hidden_layers"])
        )
        config.check_target(
            hidden_size=target["hidden_size"],
            vocab_size=target["vocab_size"],
            num_layers=target["num_hidden_layers"],
        )
