"""`sglang-dflash check-gpu`: its verdict, its report, and a machine without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.common.machine import hardware
from sglang_dflash.tools import cli
from sglang_dflash.tools.cli import check_gpu
from sglang_dflash.tools.gpu_check import plan, verdict

ATTENTION = {"triton": "as torch, recorded as eager", "fa4": "runs on sm_100, not here"}


def step(over: float, ms: float = 1.0, waits: str | None = None) -> dict[str, Any]:
    return {"host_waits": waits, "step": {"graph_over_floor": over, "graph_ms": ms}}


GOOD: dict[str, dict[str, Any]] = {
    "bandwidth": {"bytes_per_s": 3e12},
    "check/Q": {"ops": ["accept"], "attention": ATTENTION},
    "fold": {"largest_error": 0.0, "kernel_ms": 1.0},
    "kernels/Q/1": {"largest": {"graph_over_floor": 9.0}},
    "kernels/Q/256": {"largest": {"graph_over_floor": 1.1}},
    "phases/Q/1x4096": step(1.2),
    "phases/Q/1x4096w4096": step(1.2),
    "phases/Q/1x131072w4096": step(1.2, 1.01),
}
BAD = {
    "fold": ({"failed": "it differs from torch by 1"}, "fold: it differs from torch by 1"),
    "check/Q": (
        {"attention": {"triton": "no kernel image"}},
        "check/Q: attention triton: no kernel image",
    ),
    "phases/Q/1x4096": (
        step(1.2, waits="called a synchronizing operation"),
        "phases/Q/1x4096: the host waits for the GPU (called a synchronizing operation)",
    ),
}
SLOW = {
    "phases/Q/1x4096": (step(1.4), "a step takes 1.4 of its floor; the goal is 1.3"),
    "phases/Q/1x131072w4096": (step(1.2, 1.2), "1.20 of the time of phases/Q/1x4096w4096"),
    "kernels/Q/256": ({"largest": {"graph_over_floor": 1.3}}, "largest takes 1.3 of its floor"),
}


def checked(
    parts: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: Path,
    only: str = "",
) -> tuple[int, str, str]:
    """The command on a machine with a GPU, whose parts give these figures."""

    def run(of_the_plan: Mapping[str, plan.CheckPart]) -> Iterator[dict[str, Any]]:
        assert list(of_the_plan) == list(plan.select_parts(False, only))
        yield {"bandwidth": parts["bandwidth"]}
        yield parts

    monkeypatch.setattr(plan, "run", run)
    made = hardware() | {"accelerator": "NVIDIA H100"}
    monkeypatch.setattr(check_gpu, "hardware", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    status = cli.main(["check-gpu", "--out", str(out), *(["--only", only] if only else [])])
    return status, *capsys.readouterr()


def test_a_gpu_that_computes_what_torch_does_is_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    status, shown, _ = checked(GOOD, monkeypatch, capsys, out)
    assert status == 0 and shown.startswith("ACCEPT NVIDIA H100: ") and "(8 parts)" in shown
    assert "slower" not in shown and f"report: {out}" in shown
    report = json.loads(out.read_text())
    assert report["parts"] == GOOD and report["hardware"]["torch"] and report["sglang_dflash"]
    assert report["command"] == f"sglang-dflash check-gpu --out {out}"


@pytest.mark.parametrize(("only", "is_judged"), [("check", True), ("kernels", False)])
def test_times_alone_accept_nothing(
    only: str,
    is_judged: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    parts = {name: GOOD[name] for name in GOOD if name == "bandwidth" or name.startswith(only)}
    status, shown, _ = checked(parts, monkeypatch, capsys, tmp_path / "report.json", only)
    assert status == 0 and shown.startswith("ACCEPT" if is_judged else "NOT JUDGED NVIDIA H100: ")


@pytest.mark.parametrize("name", BAD)
def test_one_that_does_not_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures, words = BAD[name]
    parts = {**GOOD, name: figures}
    status, shown, err = checked(parts, monkeypatch, capsys, tmp_path / "report.json")
    assert status == 1 and shown.startswith("REJECT NVIDIA H100:") and f"\n  {words}\n" in shown
    assert "--speculative-dflash-worker builtin" in err


@pytest.mark.parametrize("name", SLOW)
def test_a_goal_that_is_missed_is_told_and_no_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures, words = SLOW[name]
    parts = {**GOOD, name: figures}
    status, shown, _ = checked(parts, monkeypatch, capsys, tmp_path / "report.json")
    assert status == 0 and f"slower than computed: {name}: " in shown and words in shown
    assert verdict.find_failures(parts) == [] and len(verdict.find_missed_goals(parts)) == 1


def test_without_a_gpu_it_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["check-gpu", "--out", str(tmp_path / "report.json")])
    shown = capsys.readouterr()
    assert ended.value.code == 2 and not shown.out and not list(tmp_path.iterdir())
    assert len(shown.err.splitlines()) == 1 and "torch finds no CUDA device here" in shown.err


def test_it_can_be_tried_on_a_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert cli.main(["check-gpu", "--tiny", "--only", "check", "--out", str(out)]) == 0
    assert "nothing is judged" in capsys.readouterr().out
    assert set(json.loads(out.read_text())["parts"]) == {"bandwidth", "check/tiny"}
