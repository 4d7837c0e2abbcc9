"""Verify widths that change from step to step: outputs are plain decoding's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import requests

from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.hybrid_requests import hybrid_answers, outputs
from tests.engine.servers import (
    ADAPTIVE,
    HYBRID_PAIR_PLAIN,
    HYBRID_PAIR_WIDTHS,
    HYBRID_PLAIN,
    HYBRID_WIDTHS,
    PLAIN,
    RANDOM_WIDTHS,
    RANDOM_WIDTHS_TP2,
    RANDOM_WIDTHS_WINDOW,
    ServerConfig,
)
from tests.engine.session import ServerSession
from tests.engine.test_graphs import run_pair
from tests.engine.test_hybrid import assert_hits, assert_same_states


@pytest.mark.recorded(PLAIN, workload.run)
@pytest.mark.parametrize(
    "config",
    [
        RANDOM_WIDTHS,
        RANDOM_WIDTHS_WINDOW,
        pytest.param(RANDOM_WIDTHS_TP2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_outputs_do_not_depend_on_widths(
    config: ServerConfig, answers: Any, server: Server
) -> None:
    plain, got = answers(PLAIN, workload.run), answers(config, workload.run_half)
    workload.assert_same_outputs(got, workload.halved(plain))
    report = server.dflash()
    assert all(steps > 20 for steps in report["width_steps"].values())
    # A drafter that is never right would pass the comparison, too. (0.32 to 0.43 in eight runs. The
    # acceptance length of an answer would depend on how many of its steps were drawn as plain.)
    assert report["acceptance_by_position"][0] > 0.15
    assert report["nonfinite_outputs"] == 0


@pytest.mark.server(HYBRID_PAIR_WIDTHS)
@pytest.mark.recorded(HYBRID_PAIR_PLAIN, run_pair)
def test_recurrent_states_follow_every_width(answers: Any, server: Server) -> None:
    assert answers(HYBRID_PAIR_WIDTHS, run_pair) == answers(HYBRID_PAIR_PLAIN, run_pair)
    report = server.dflash()
    assert report["recurrent_rollback"] == "replay" and report["acceptance_by_position"][0] > 0.5
    assert all(steps > 10 for steps in report["width_steps"].values())


@pytest.mark.recorded(HYBRID_PLAIN, hybrid_answers)
@pytest.mark.parametrize(
    ("config", "kept"),
    [
        pytest.param(HYBRID_WIDTHS["extra-buffer"], "extra-buffer", id="extra-buffer"),
        pytest.param(HYBRID_WIDTHS["lazy"], "lazy", id="lazy", marks=pytest.mark.long),
    ],
)
def test_states_that_the_prefix_cache_keeps_follow_every_width(
    config: ServerConfig, kept: str, answers: Any, server: Server, servers: ServerSession
) -> None:
    """A step of plain decoding passes checkpoints, too."""
    ours, plain = answers(config, hybrid_answers), answers(HYBRID_PLAIN, hybrid_answers)
    for got, expected in zip(ours, plain, strict=True):
        assert outputs(got) == outputs(expected)
    assert_hits(kept, ours, plain)
    assert all(steps > 20 for steps in server.dflash()["width_steps"].values())
    assert_same_states(servers, config)


@pytest.mark.server(ADAPTIVE)
@pytest.mark.recorded(PLAIN, workload.run)
def test_an_adaptive_server_is_exact_and_shows_its_choices(answers: Any, server: Server) -> None:
    plain, got = answers(PLAIN, workload.run), answers(ADAPTIVE, workload.run_half)
    workload.assert_same_outputs(got, workload.halved(plain))
    report = server.dflash()
    assert report["width"] == "adaptive" and all(report["width_steps"].values())
    assert sum(report["width_steps"].values()) == report["decode_steps"]
    assert report["width_costs"] and report["width_drafts_accepted"] > 0
    metrics = requests.get(f"{server.url}/metrics", timeout=60).text
    counted = re.findall(r'sglang_dflash_steps_total\{.*width="(\d+)".*\} ([\d.]+)', metrics)
    assert {width: float(n) for width, n in counted} == report["width_steps"]
