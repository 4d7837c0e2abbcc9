"""The README's own command, with no flag and no environment variable beyond it; and the package's claims about its parts."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash import cli
from sglang_dflash.bench.server import Server
from tests.serving import workload
from tests.serving.conftest import BASE, DFLASH, PAIR, Running


def test_generate_says_what_is_served(answers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for text, served in zip(workload.prompts()["demo"][:4], answers("dflash")["demo"][:4], strict=True):
        assert cli.main(["generate", "--prompt", text, "--max-new-tokens", str(workload.NEW_TOKENS), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == served["output_ids"]


def test_the_readme_command_serves_in_bfloat16(running: Running) -> None:
    assert "TRITON_INTERPRET" not in os.environ
    running.stop()
    with Server(["--model-path", str(PAIR.target), *DFLASH]) as server:
        assert server.dflash()["draft_kv_dtype"] == "bfloat16"
        answers = [server.generate(text, temperature=0, max_new_tokens=40, ignore_eos=True) for text in workload.prompts()["demo"][:6]]
        assert workload.acceptance_length(answers) > 2


def test_prometheus_series_are_the_workers_counts(running: Running) -> None:
    """Two replicas, each with series of its own; started from the command line, because prometheus_client reads its folder on import."""
    running.stop()
    with Server([*BASE, *DFLASH, "--dp-size", "2", "--enable-metrics"]) as server:
        for text in workload.prompts()["demo"][:6]:
            server.generate(text, temperature=0, max_new_tokens=40, ignore_eos=True)
        states = [state["dflash"] for state in requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"]]
        series = requests.get(f"{server.url}/metrics", timeout=60).text
    for rank, state in enumerate(states):
        # Every replica is given some of the requests, the warm-up included.
        assert state["verify_steps"] > 0
        steps, tokens = (total(series, f"sglang_dflash_{name}_total", dp_rank=rank) for name in ("verify_steps", "committed_tokens"))
        assert steps == state["verify_steps"] and round(tokens / steps, 4) == state["acceptance_length"]
        for position, share in enumerate(state["acceptance_by_position"], 1):
            accepted = total(series, "sglang_dflash_accepted_drafts_total", dp_rank=rank, position=position)
            assert round(accepted / steps, 4) == share


def total(series: str, name: str, **labels: int) -> float:
    """Of the one sample with that name and those labels."""
    found = [
        sample.value
        for family in text_string_to_metric_families(series)
        for sample in family.samples
        if sample.name == name and all(sample.labels.get(label) == str(value) for label, value in labels.items())
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]
