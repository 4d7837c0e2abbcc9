"""`python -m experiments gpu` with servers, on the CPU platform."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.facts.embedded import demo_pair

ROOT = Path(__file__).parents[2]
PAIR = demo_pair("dense")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_servers_are_compared(tmp_path: Path) -> None:
    """The other parts are in tests/bench/test_gpu.py."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments", "gpu", "--device", "cpu", "--size", "tiny"),
            *("--target", str(PAIR.target), "--draft", str(PAIR.draft)),
            *("--levels", "2x40", "--new-tokens", "64", "--state", str(tmp_path / "state.json")),
            *("--flags", "--dtype float32 --max-total-tokens 16384 --sleep-on-idle"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] == result["skipped"] == {}
    parts = result["parts"]
    assert parts["server/ours"]["worker"]["draft_attention"] == "torch"
    # Four tokens per step, as simulated, and one without a draft.
    rates = {name: parts[f"server/{name}"]["2x40"] for name in ("plain", "ours", "builtin")}
    per_step = {name: one["decode_tok_s"] * one["step_ms"] / 2000 for name, one in rates.items()}
    assert per_step["plain"] == pytest.approx(1, rel=0.05)
    assert per_step["ours"] == pytest.approx(4, rel=0.3)
    assert per_step["builtin"] == pytest.approx(4, rel=0.3)
    assert set(result["goals"]["servers"]["2x40"]) == {"ours_over_plain", "ours_over_builtin"}
