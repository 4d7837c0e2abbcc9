"""Drafts of no use on a server: the log and /server_info and /metrics tell, and the doctor names
the cause. (They change no output: test_exactness.py.)"""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash.drafting.acceptance_length import JUDGED_STEPS
from sglang_dflash.serving.metrics.server_info import ServerInfo
from sglang_dflash.tools import cli
from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.cli.doctor import examine
from tests.engine.servers import (
    ADAPTIVE,
    BUILTIN,
    DFLASH,
    OVERFLOWING,
    PLAIN,
    SIMULATED,
    ServerConfig,
)
from tests.engine.workload import many_steps, run_half
from tests.tools.cli.test_doctor import HEALTHY

LOSING = DFLASH.named("losing").having(
    speculative_dflash_extension="tests.engine.extensions:slow_drafts"
)


def doctor(server: Server, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Problems by name."""
    capsys.readouterr()
    status = cli.main(["doctor", server.url, "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert status == (1 if findings else 0)
    return {finding["name"]: finding["problem"] for finding in findings}


@pytest.mark.server(OVERFLOWING)
def test_the_alarm_is_raised(
    server: Server, answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(OVERFLOWING, many_steps)
    report, found = server.dflash(), doctor(server, capsys)
    assert report["acceptance_alarm"] is True and report["recent_acceptance_length"] < 1.2
    # Every drafted token of every step, those of requests that had just finished included.
    assert report["nonfinite_outputs"] >= 7 * report["verify_steps"] > 7 * JUDGED_STEPS
    log = server.log.read_text()
    assert log.count("the drafts are of no use") == log.count("NaN or Inf") == 1
    assert "acceptance-alarm" in found and "NaN or Inf" in found["nonfinite-outputs"]
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    families = text_string_to_metric_families(text)
    shown = {sample.name: sample.value for family in families for sample in family.samples}
    assert shown["sglang_dflash_acceptance_alarm"] == 1
    assert shown["sglang_dflash_nonfinite_outputs_total"] == report["nonfinite_outputs"]


@pytest.mark.long
@pytest.mark.server(LOSING)
def test_the_log_tells_once_that_drafts_do_not_pay(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the times of its own steps; of some use they are, so that no alarm is raised."""
    while server.dflash().get("verify_steps", 0) < 4 * JUDGED_STEPS:
        many_steps(server)
    (line,) = [line for line in server.log.read_text().splitlines() if "do not pay" in line]
    assert "drafts do not pay on this traffic: acceptance length" in line and "as a plain" in line
    assert server.dflash()["acceptance_alarm"] is False
    assert "drafts do not pay" in doctor(server, capsys)["drafts-do-not-pay"]


@pytest.mark.server(ADAPTIVE)
def test_the_doctor_finds_nothing_wrong_with_a_sound_server(
    server: Server, answers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(ADAPTIVE, run_half)
    assert doctor(server, capsys) == {}
    # The values that its tests are made of are the keys of a real server.
    assert set(HEALTHY) <= set(server.dflash())
    # What it measures of its steps, from which the break-even follows; a surprise empties it.
    told = ServerInfo(info(server))
    costs = told.reports[0]["width_costs"]
    assert all({"requests", "context", "milliseconds"} == set(place) for place in costs)
    assert all("1" in place["milliseconds"] for place in costs)
    assert told.break_even_line() is not None and told.break_even_at_least is None


def info(server: Server) -> dict[str, Any]:
    """/server_info."""
    return requests.get(f"{server.url}/server_info", timeout=60).json()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (PLAIN, "no-dflash"),
        (BUILTIN, "builtin-worker"),
        (SIMULATED, "simulated-acceptance"),
    ],
    ids=str,
)
def test_the_doctor_names_other_servers(config: ServerConfig, found: str, answers: Any) -> None:
    findings = examine(ServerInfo(answers(config, info)))
    assert findings[0].name == found
    if config == BUILTIN:
        assert "--speculative-dflash-worker builtin" in findings[0].problem
