"""Every finding of the doctor, from constructed values of /server_info."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.doctor.findings import CHECKS, Finding, examine
from sglang_dflash.doctor.reading import Reading

# What a healthy server of ours shows, of what the doctor reads (tests/engine/test_alarm.py compares
# the keys with a real server's).
HEALTHY: dict[str, Any] = {
    "acceptance_alarm": False,
    "recent_acceptance_length": 4.1,
    "verify_steps": 5000,
    "committed_tokens": 20000,
    "undrafted_steps": 10,
    "nonfinite_outputs": 0,
    "draft_context_share": 0.99,
    "draft_kv_entries": 4160,
    "context_length": 32768,
    "draft_max_position_embeddings": 40960,
    "ignored_seeds": False,
    "simulated_acceptance": None,
    "width": "fixed",
}


def reading(*reports: dict[str, Any], metrics: Any = None, **info: Any) -> Reading:
    """A server of ours; each report replaces keys of a healthy rank."""
    states = [{"dflash": {**HEALTHY, **report}} for report in reports or ({},)]
    return Reading({"speculative_algorithm": "DFLASH", "internal_states": states, **info}, metrics)


def builtin(**state: Any) -> Reading:
    return Reading({"speculative_algorithm": "DFLASH", "internal_states": [state]})


RETRACTED = {"sglang:num_retracted_requests_total": [30.0], "sglang:num_requests_total": [100.0]}
# Name of the finding, how it comes about, and what must be said.
CASES: dict[str, tuple[str, Reading, tuple[str, ...]]] = {
    "plain decoding": (
        "no-dflash",
        Reading({"speculative_algorithm": None, "internal_states": [{}]}),
        ("plain decoding", "--speculative-algorithm DFLASH"),
    ),
    "another algorithm": (
        "no-dflash",
        Reading({"speculative_algorithm": "EAGLE", "internal_states": [{}]}),
        ("EAGLE",),
    ),
    "built-in with a reason": (
        "builtin-worker",
        builtin(dflash_builtin_reason="--disaggregation-mode", avg_spec_accept_length=4.0),
        ("--disaggregation-mode",),
    ),
    "built-in without the plugin": (
        "builtin-worker",
        builtin(avg_spec_accept_length=4.0),
        ("plugin", "sglang-dflash env"),
    ),
    "simulated": (
        "simulated-acceptance",
        reading({"simulated_acceptance": 3.5, "acceptance_alarm": True}),
        ("3.5 tokens per step", "no meaning"),
    ),
    "NaN": ("nonfinite-outputs", reading({}, {"nonfinite_outputs": 7}), ("7 outputs", "NaN")),
    "alarm": (
        "acceptance-alarm",
        reading({"acceptance_alarm": True, "recent_acceptance_length": 1.02}),
        ("1.02", "512 verify steps", "another target"),
    ),
    "alarm of one rank": (
        "acceptance-alarm",
        reading({}, {"acceptance_alarm": True, "recent_acceptance_length": 1.1}),
        ("1.10",),
    ),
    "near 1, no verdict yet": (
        "acceptance-near-1",
        reading({"verify_steps": 300, "committed_tokens": 310, "recent_acceptance_length": None}),
        ("1.03", "broken draft checkpoint"),
    ),
    "below 2": (
        "acceptance-below-2",
        reading({"verify_steps": 1000, "committed_tokens": 1700}),
        ("1.70", "sglang-dflash bench"),
    ),
    "small cache": (
        "draft-kv-too-small",
        reading({"draft_context_share": 0.41, "draft_kv_entries": 416}),
        ("41%", "--speculative-dflash-draft-kv-tokens (now 416)"),
    ),
    "logit processors": (
        "many-undrafted",
        reading({"undrafted_steps": 5000}),
        ("50% of the decode steps", "custom logit processor"),
    ),
    "long contexts": (
        "long-contexts",
        reading({"draft_max_position_embeddings": 4096}),
        ("32768", "4096", "--context-length 4096"),
    ),
    "seeds": ("ignored-seeds", reading({"ignored_seeds": True}), ("--enable-deterministic",)),
    "retractions": (
        "retractions",
        reading(metrics=RETRACTED),
        ("30 retractions in 100 requests", "--max-running-requests"),
    ),
}


def test_an_adaptive_server_drafts_as_long_as_that_pays() -> None:
    adaptive = {"width": "adaptive", "undrafted_steps": 10_000, "verify_steps": 1000}
    assert examine(reading({**adaptive, "committed_tokens": 1700})) == []
    (found,) = examine(reading({**adaptive, "committed_tokens": 1030}))
    assert found.name == "acceptance-near-1" and "drafts rarely" in found.advice
    assert "leave out" not in found.advice


@pytest.mark.parametrize(("name", "server", "words"), CASES.values(), ids=CASES)
def test_it_finds_what_is_wrong_and_nothing_else(
    name: str, server: Reading, words: tuple[str, ...]
) -> None:
    (finding,) = examine(server)
    assert finding.name == name
    text = f"{finding.problem}\n{finding.advice}"
    assert all(word in text for word in words), text
    assert "\n" not in finding.problem


def test_every_check_has_a_case() -> None:
    found = {check for check in CHECKS for _, server, _ in CASES.values() if check(server)}
    assert found == set(CHECKS)


@pytest.mark.parametrize(
    "server",
    [
        reading(),
        reading({}, {}),
        # Too little to judge: a server that has just started.
        reading({"verify_steps": 60, "committed_tokens": 61, "recent_acceptance_length": None}),
        reading({"verify_steps": 0, "committed_tokens": 0, "draft_context_share": None}),
        reading({"undrafted_steps": 99, "verify_steps": 0, "committed_tokens": 0}),
        reading({"undrafted_steps": 5000, "width": "adaptive"}),
        # The alarm ended a while ago.
        reading({"recent_acceptance_length": 1.4}),
        reading(metrics={**RETRACTED, "sglang:num_retracted_requests_total": [1.0]}),
        reading(metrics={}),
    ],
)
def test_a_healthy_server_has_no_finding(server: Reading) -> None:
    assert examine(server) == []


def test_a_builtin_worker_is_judged_by_sglangs_own_figure() -> None:
    found = examine(builtin(dflash_builtin_reason="x", avg_spec_accept_length=1.05))
    assert [f.name for f in found] == ["builtin-worker", "acceptance-near-1"]


def test_several_findings_are_all_reported() -> None:
    broken = reading(
        {
            "acceptance_alarm": True,
            "recent_acceptance_length": 1.0,
            "nonfinite_outputs": 9,
            "ignored_seeds": True,
        }
    )
    names = [finding.name for finding in examine(broken)]
    assert names == ["nonfinite-outputs", "acceptance-alarm", "ignored-seeds"]


def test_a_report_without_the_newer_keys_is_no_error() -> None:
    """A server with an older version of the package."""
    older = {"verify_steps": 10, "committed_tokens": 30}
    shown = {"speculative_algorithm": "DFLASH", "internal_states": [{"dflash": older}]}
    assert examine(Reading(shown)) == []


def test_findings_are_plain_data() -> None:
    (finding,) = examine(CASES["seeds"][1])
    assert set(finding._asdict()) == set(Finding._fields)
