"""The summary of a profiler's trace, and what it is asked for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import runner, step_profile
from experiments.step_profile import read_trace, summary


def event(cat: str, name: str, ts: float, dur: float = 1.0, at: int | None = None) -> Any:
    args = {} if at is None else {"correlation": at}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def note(name: str, ts: float, dur: float) -> Any:
    return event("user_annotation", name, ts, dur)


# A prefill, and two steps of which the second has no end.
TRACE = [
    {"ph": "M", "name": "process_name"},
    note("scheduler.run_batch", 0, 4000),
    note("step[EXTEND bs=1 toks=512]", 10, 100),
    event("cuda_runtime", "cudaLaunchKernel", 20, at=1),
    event("cuda_runtime", "cudaMemcpyAsync", 30, at=2),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 40, 500, at=2),
    # It runs in the next iteration, but is this one's.
    event("kernel", "gemm", 5200, 1500, at=1),
    note("scheduler.run_batch", 5000, 2000),
    note("step[VERIFY bs=1]", 5010, 100),
    event("cuda_runtime", "cudaGraphLaunch", 5020, at=3),
    event("cuda_driver", "cuLaunchKernelEx", 5030, at=4),
    event("cuda_runtime", "cudaMalloc", 5040),
    event("cuda_runtime", "cudaStreamSynchronize", 5050),
    event("kernel", "attention", 6000, 250, at=3),
    event("cuda_runtime", "cudaEventSynchronize", 7500),
    note("scheduler.run_batch", 8000, 2000),
]


def test_an_iteration_has_what_it_launched() -> None:
    profiled = summary(TRACE[::-1])
    assert profiled["prefill"] == {
        "iterations": 1,
        "host_ms": 4.0,
        "until_done_ms": 6.7,
        "graph_launches": 0,
        "kernel_launches": 1,
        "copies": 1,
        "waits": 0,
        "waits_in_run_batch": 0,
        "allocations": 0,
        "pageable_copies": 1,
        "gpu_busy_ms": 2.0,
    }
    step = profiled["step"]
    assert (step["host_ms"], step["gpu_busy_ms"], step["pageable_copies"]) == (2.0, 0.25, 0)
    assert (step["waits"], step["waits_in_run_batch"], step["allocations"]) == (2, 1, 1)
    assert (step["graph_launches"], step["kernel_launches"]) == (1, 1)


def test_a_prefill_after_a_step_is_told_apart() -> None:
    """A request that comes when an answer has ended is one, and its first token is timed."""
    later = [{**e, "ts": e["ts"] + 8000} for e in TRACE[1:6]]
    more = [note("scheduler.run_batch", 16000, 1000), note("step[EXTEND bs=1]", 16010, 100)]
    profiled = summary([*TRACE[:-1], *later, *more, note("scheduler.run_batch", 18000, 10)])
    phases = ("prefill", "prefill_after_step", "step")
    assert [profiled[phase]["iterations"] for phase in phases] == [2, 1, 1]


def test_each_request_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(prompt: list[int], tokens: int, **_: Any) -> None:
        asked.append(tokens)

    monkeypatch.setattr(step_profile.load, "send_request", lambda *_, **__: SimpleNamespace(ok=1))
    monkeypatch.setattr(step_profile, "read_trace", lambda _: TRACE)
    server: Any = SimpleNamespace(ask=ask, url="")
    step_profile.profile(server, 1, step_profile.Options(steps=24))
    assert asked == [6, 384, 6, 384]


def test_a_trace_that_is_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gzip.compress(json.dumps({"traceEvents": TRACE}).encode())
    path = tmp_path / "profile" / "TP-0.trace.json.gz"
    path.parent.mkdir()
    path.write_bytes(whole[:100])
    monkeypatch.setattr(step_profile.time, "sleep", lambda seconds: path.write_bytes(whole))
    assert read_trace(tmp_path) == TRACE


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ([], "--base-url"),
        (["--base-url", "http://127.0.0.1:1"], "--base-url"),
        (["--base-url", "a=http://127.0.0.1:1", "--concurrency", "1,x"], "--concurrency"),
        (["--base-url", "a=http://127.0.0.1:1", "--concurrency", "0"], "--concurrency"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    argv: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["step_profile", *argv]) == 1
    assert capsys.readouterr().err.startswith(f"step_profile: {flag}")
