"""The acceptance length from which drafts pay, by a server's own measurements, and servers that
measure nothing."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.serving.metrics.server_info import ServerInfo
from sglang_dflash.tools.cli.doctor import as_text, examine
from tests.tools.cli.test_doctor import reading

COSTS = [
    {"requests": 1, "context": 2048, "milliseconds": {"1": 10.0, "4": 13.1, "8": 16.2}},
    # Not measured there: plain steps, and those of width 8.
    {"requests": 2, "context": 2048, "milliseconds": {"1": None, "4": 13.0, "8": 20.0}},
    {"requests": 8, "context": 2048, "milliseconds": {"1": 20.0, "4": 42.0, "8": None}},
    {"requests": 8, "context": 8192, "milliseconds": {"1": 40.0, "4": 50.0, "8": None}},
]
ADAPTIVE = {"width": "adaptive", "width_now": 8, "width_costs": COSTS}


def on_a_gpu(report: dict[str, Any]) -> ServerInfo:
    server = reading(report)
    server.states[0]["machine"] = {"accelerator": "an H100"}
    return server


@pytest.mark.parametrize("server", [reading(ADAPTIVE), on_a_gpu(ADAPTIVE)])
def test_an_adaptive_server_measures_it(server: ServerInfo) -> None:
    points = [(point.requests, point.context, point.width) for point in server.break_even]
    assert points == [(1, 2048, 4), (1, 2048, 8), (8, 2048, 4), (8, 8192, 4)]
    assert [point.acceptance_length for point in server.break_even] == [1.31, 1.62, 2.1, 1.25]
    assert server.break_even_line() == (
        "drafts pay from this acceptance length: with one request 1.31 at width 4, 1.62 at width "
        "8; with up to 8 requests 2.10 at width 4; by the latest text the server now takes width 8"
    )
    # It never loses for long, whatever the bound by its parts is.
    assert server.losing is server.break_even_at_least is None


@pytest.mark.parametrize("costs", [[], COSTS[1:2]], ids=["none", "no plain step"])
def test_an_adaptive_server_without_a_measurement_has_no_bound(costs: list[Any]) -> None:
    """Its parts are those of plain steps, too. A surprise makes it forget what it has measured."""
    server = reading({**ADAPTIVE, "width_costs": costs, "committed_tokens": 5100})
    assert server.losing is server.break_even_at_least is None
    assert "not measured yet" in str(server.break_even_line())


@pytest.mark.parametrize(
    ("shares", "least"),
    [
        ({"verify": 0.6, "propose": 0.25, "commit": 0.05, "host": 0.1}, 1.43),
        ({"verify": 1.0, "propose": 0.0, "commit": 0.0, "host": 0.0}, 1.0),
        ({}, None),
    ],
)
def test_a_fixed_width_on_a_cpu_has_a_bound(shares: dict[str, float], least: float) -> None:
    """A plain step needs no draft, and its forward is over fewer tokens."""
    report = {"step_shares": shares, "verify_steps": 1000, "committed_tokens": 1400}
    server = reading(report)
    assert server.break_even == [] and server.break_even_at_least == least
    assert (server.losing is not None) == (least == 1.43)
    for early in ({"verify_steps": 99, "committed_tokens": 110}, {"decode_steps": 99}):
        assert reading({**report, **early}).losing is None
    assert reading({**report, "committed_tokens": 1440}).losing is None


def test_a_fixed_width_on_a_gpu_measures_no_plain_step() -> None:
    """The host's clock tells how long a part's launch takes."""
    server = on_a_gpu({"verify_steps": 1000, "committed_tokens": 1100})
    assert server.losing is server.break_even_at_least is None
    line = server.break_even_line()
    assert line is not None and "is not measured" in line and "sglang-dflash bench" in line


def test_nothing_is_told_of_a_server_that_has_just_started_or_is_not_ours() -> None:
    assert reading({"decode_steps": 99}).break_even_line() is None
    plain = ServerInfo({"internal_states": [{}]})
    assert plain.break_even_line() is plain.losing is plain.break_even_at_least is None
    assert plain.break_even == []


def test_a_prefill_server_is_not_asked_for_acceptance() -> None:
    idle = {"verify_steps": 0, "committed_tokens": 0, "undrafted_steps": 0, "decode_steps": 0}
    server = ServerInfo({**reading(idle).info, "disaggregation_mode": "prefill"})
    assert examine(server) == []
    *_, last, verdict = as_text(server, []).splitlines()
    assert (last.partition(";")[0], verdict) == (
        "a prefill server drafts nothing", "nothing wrong found",
    )  # fmt: skip
    assert "acceptance length" not in "\n".join(server.lines())


def test_a_step_is_that_of_the_replica_with_the_most() -> None:
    idle = {"decode_steps": 12, "step_milliseconds": 90.0, "step_shares": {}}
    server = reading(idle, {})
    assert (server.step_line() or "").startswith("a step takes 21.3 ms")
    assert "above 1.23" in (server.break_even_line() or "")
    assert server.facts()["step_milliseconds"] == 21.34
