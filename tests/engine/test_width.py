"""Adaptive verify widths on a server. (Widths drawn at random: test_exactness.py.)"""

from __future__ import annotations

import re
from typing import Any

import pytest
import requests

from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.servers import ADAPTIVE, PLAIN


@pytest.mark.server(ADAPTIVE)
@pytest.mark.recorded(PLAIN, workload.run)
def test_an_adaptive_server_is_exact_and_shows_its_choices(answers: Any, server: Server) -> None:
    plain, got = answers(PLAIN, workload.run), answers(ADAPTIVE, workload.run_half)
    workload.assert_same_outputs(got, workload.halved(plain))
    report = server.dflash()
    assert report["width"] == "adaptive" and all(report["width_steps"].values())
    assert sum(report["width_steps"].values()) == report["decode_steps"]
    assert report["width_costs"]
    metrics = requests.get(f"{server.url}/metrics", timeout=60).text
    counted = re.findall(r'sglang_dflash_steps_total\{.*width="(\d+)".*\} ([\d.]+)', metrics)
    assert {width: float(n) for width, n in counted} == report["width_steps"]
