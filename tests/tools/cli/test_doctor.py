"""`sglang-dflash doctor` against a server that answers with constructed values."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_dflash.serving.metrics.server_info import ServerInfo
from sglang_dflash.tools import cli
from sglang_dflash.tools.bench.server import free_port
from sglang_dflash.tools.cli.doctor import as_text, examine
from tests import ROOT

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
    "draft_kv_bytes": 3 << 20,
    "block_size": 8,
    "trained_block_size": 8,
    "version": "0.1.0",
    "warnings": [],
    "simulated_acceptance": None,
    "width": "fixed",
    "decode_steps": 4000,
    "step_milliseconds": 21.34,
    "step_shares": {"verify": 0.712, "propose": 0.149, "commit": 0.04, "host": 0.099},
}


def reading(*reports: dict[str, Any]) -> ServerInfo:
    """A server of ours; each report replaces keys of a healthy rank."""
    states = [{"dflash": {**HEALTHY, **report}} for report in reports or ({},)]
    return ServerInfo({"speculative_algorithm": "DFLASH", "internal_states": states})


def others(algorithm: str | None = "DFLASH", **state: Any) -> ServerInfo:
    return ServerInfo({"speculative_algorithm": algorithm, "internal_states": [state]})


WARNED = {"name": "block-above-trained", "problem": "--block: 100 is more", "advice": "give 8"}
STARTED = {"verify_steps": 60, "committed_tokens": 61, "recent_acceptance_length": None}
# The findings, what they come from, and what must be said.
CASES: list[tuple[list[str], ServerInfo, list[str]]] = [
    (["no-dflash"], others(None), ["plain decoding", "--speculative-algorithm DFLASH"]),
    (["no-dflash"], others("EAGLE"), ["EAGLE"]),
    (["builtin-worker"], others(dflash_builtin_reason="--pp-size"), ["--pp-size"]),
    (["builtin-worker"], others(avg_spec_accept_length=4.0), ["sglang-dflash env"]),
    (
        ["no-dflash", "contained-steps"],
        others(None, containment={"contained_steps": 3, "ended_requests": 1, "last_error": "E: x"}),
        ["3 steps failed and 1 requests", "E: x"],
    ),
    # Judged by SGLang's own figure.
    (["builtin-worker", "acceptance-near-1"], others(avg_spec_accept_length=1.05), ["1.05"]),
    (
        ["simulated-acceptance"],
        reading({"simulated_acceptance": 3.5, "acceptance_alarm": True}),
        ["3.5"],
    ),
    (["nonfinite-outputs"], reading({}, {"nonfinite_outputs": 7}), ["7 outputs"]),
    (
        ["acceptance-alarm"],
        reading({}, {"acceptance_alarm": True, "recent_acceptance_length": 1.1}),
        ["1.10", "another target", "leave out"],
    ),
    (
        ["acceptance-near-1"],
        reading({**STARTED, "verify_steps": 300, "committed_tokens": 310}),
        ["1.03"],
    ),
    (["acceptance-below-2"], reading({"verify_steps": 1000, "committed_tokens": 1700}), ["1.70"]),
    # By the times of HEALTHY, 1.23 breaks even at best.
    (
        ["drafts-do-not-pay"],
        reading({"verify_steps": 1000, "committed_tokens": 1210}),
        ["1.21, and a step takes 1.23 times", "--speculative-dflash-width adaptive"],
    ),
    # A replica without traffic measures nothing.
    (
        ["drafts-do-not-pay"],
        reading(
            {**STARTED, "decode_steps": 12, "step_shares": {}},
            {"verify_steps": 1000, "committed_tokens": 1219},
        ),
        ["1.21, and a step takes 1.23 times"],
    ),
    (
        ["draft-kv-too-small"],
        reading({"draft_context_share": 0.41, "draft_kv_entries": 416}),
        ["41%", "--speculative-dflash-draft-kv-tokens (now 416)"],
    ),
    (["many-undrafted"], reading({"undrafted_steps": 5000}), ["50%"]),
    (["block-above-trained"], reading({"warnings": [WARNED]}), ["--block: 100 is more", "give 8"]),
    # What the server was started with comes before the causes that are guessed.
    (
        ["block-above-trained", "acceptance-below-2"],
        reading({"warnings": [WARNED], "verify_steps": 1000, "committed_tokens": 1700}),
        ["see to block-above-trained first; otherwise look for a draft"],
    ),
    (
        ["nonfinite-outputs", "acceptance-alarm", "many-undrafted"],
        reading({"acceptance_alarm": True, "nonfinite_outputs": 9, "undrafted_steps": 5000}),
        [],
    ),
    # An adaptive server drafts as long as that pays.
    (
        ["acceptance-near-1"],
        reading({"width": "adaptive", "verify_steps": 1000, "committed_tokens": 1030}),
        ["drafts rarely"],
    ),
    ([], reading({"width": "adaptive", "verify_steps": 1000, "committed_tokens": 1700}), []),
    ([], reading({"width": "adaptive", "undrafted_steps": 10_000}), []),
    ([], reading({}, {}), []),
    # Too little to judge: a server that has just started.
    ([], reading(STARTED), []),
    ([], reading({**STARTED, "verify_steps": 0, "draft_context_share": None}), []),
    ([], reading({"undrafted_steps": 99, "verify_steps": 0, "committed_tokens": 0}), []),
    # The alarm ended a while ago.
    ([], reading({"recent_acceptance_length": 1.4}), []),
    # A server with an older version of the package.
    ([], others(dflash={"verify_steps": 10, "committed_tokens": 30}), []),
]


@pytest.mark.parametrize(("names", "server", "words"), CASES)
def test_it_finds_what_is_wrong_and_nothing_else(
    names: list[str], server: ServerInfo, words: list[str]
) -> None:
    found = examine(server)
    assert [finding.name for finding in found] == names
    text = " ".join(f"{finding.problem} {finding.advice}" for finding in found)
    assert all(word in text for word in words), text
    assert all("\n" not in finding.problem for finding in found)


OURS = (
    "sglang-dflash 0.1.0, DFlash, block 8, window all, width fixed\ndraft KV 4,160 entries in "
    "3 MiB, target KV 16,384 tokens\nacceptance length "
)
LINES = [
    (
        {"undrafted_steps": 0},
        f"{OURS}4.00 over 5,000 steps with drafts since the start\na step takes",
    ),
    # Of an adaptive server, drafts that do not pay are no finding.
    (
        {"undrafted_steps": 15_000, "undrafted_tokens": 15_000, "width": "adaptive"},
        "4.00 over 5,000 steps with drafts since the start, 1.75 tokens per step over all 20,000 "
        "(15,000 without drafts)\na step takes",
    ),
    ({"trained_block_size": 4}, "block 8 (trained for 4), window all"),
    ({"window": 128}, "block 8, window 128"),
    (
        {**STARTED, "undrafted_steps": 0},
        f"{OURS}1.02 over 60 steps with drafts since the start\na step takes 21.3 ms: "
        "verify 71%, propose 15%, commit 4%, host 10%\ndrafts pay from an acceptance length above "
        "1.23: a plain step, which is not measured, takes no longer than a step without its "
        "drafts\ntoo early to judge acceptance: 60 of 100 steps with drafts, warm-up "
        "included; send more requests\nnothing wrong found",
    ),
    ({**STARTED, "verify_steps": 0}, f"{OURS}not known yet: no verify step\na step takes"),
]


@pytest.mark.parametrize(("report", "line"), LINES, ids=str)
def test_the_first_line_describes_the_server(report: dict[str, Any], line: str) -> None:
    server = reading(report)
    server.states[0]["memory_usage"] = {"token_capacity": 16384}
    assert line in as_text(server, examine(server))


# Forty requests at temperature 0.7.
NOT_PAYING = {
    "width": "adaptive", "verify_steps": 97, "committed_tokens": 109, "undrafted_steps": 2556,
    "undrafted_tokens": 2556, "width_steps": {"1": 2556, "4": 60, "8": 37}, "trained_block_size": 4,
    "draft_kind": "DFlash2: selector of rank 256 over 16 candidates, convolution of 2 taps",
    "window": 4096,
}  # fmt: skip


def test_traffic_on_which_drafts_do_not_pay_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """It was "too early to judge", and then "nothing wrong found"."""
    with serving(shown(reading(NOT_PAYING))) as url:
        status, out, _ = doctor(capsys, url)
        assert json.loads(doctor(capsys, url, "--json")[1])["decodes_plainly"] is True
    assert status == 0 and len(out.splitlines()[0]) <= 100
    assert out.endswith(
        "\ndrafts do not pay on this traffic, so it decodes plainly: 2,556 of 2,653 steps had "
        "none; those with drafts kept 1.12 tokens each\n"
    )
    assert "too early" not in out and "nothing wrong" not in out
    # Nor is it that with a fixed width, in the beginning, or for grammars, which take one token.
    for change in (
        {"width": "fixed"},
        {"undrafted_steps": 90, "verify_steps": 1},
        {"verify_steps": 1000},
        {"width_steps": {"1": 3, "8": 2653}},
    ):
        assert reading({**NOT_PAYING, **change}).plainly is None


def test_without_a_url_it_asks_where_sglang_listens(capsys: pytest.CaptureFixture[str]) -> None:
    asked = list[str]()

    def read(url: str, *_: Any) -> ServerInfo:
        asked.append(url)
        return reading()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sglang_dflash.tools.cli.doctor.read", read)
        assert doctor(capsys)[0] == 0
    assert asked == ["http://127.0.0.1:30000"]


@pytest.mark.parametrize(
    ("server", "line"),
    [
        (others(None), "plain decoding"),
        (others("EAGLE", avg_spec_accept_length=2.5), "EAGLE\nacceptance length 2.50 (SGLang's"),
        (others(), "builtin\nacceptance length not known yet"),
    ],
    ids=str,
)
def test_so_it_does_other_servers(server: ServerInfo, line: str) -> None:
    assert "\n".join(server.lines()).startswith(line)


@pytest.mark.parametrize(
    ("report", "machine", "line"),
    [
        ({}, {}, "a step takes 21.3 ms: verify 71%, propose 15%, commit 4%, host 10%"),
        (
            {},
            {"accelerator": "an H100"},
            "a step takes 21.3 ms; the host launches verify 71%, propose 15%, commit 4%, and works "
            "or waits in the rest",
        ),
        # The first steps take longer than others.
        ({"decode_steps": 99}, {}, None),
        ({"step_shares": {}, "step_milliseconds": None}, {}, None),
    ],
)
def test_it_tells_where_the_time_of_a_step_goes(
    report: dict[str, Any], machine: dict[str, Any], line: str | None
) -> None:
    server = reading(report)
    server.states[0]["machine"] = machine
    assert server.step_line() == line
    assert (line in as_text(server, []).splitlines()) is (line is not None)


def test_the_dtype_is_known_if_it_was_asked_for() -> None:
    for asked, told in ((None, "not known"), ("auto", "not known"), ("float32", "float32")):
        assert ServerInfo({"dtype": asked}).machine()["dtype"] == told


def test_the_page_lists_every_finding() -> None:
    page = (ROOT / "docs/doctor.md").read_text().partition("## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`([\w-]+)`", " ".join(rows)))
    from_start = {
        "lookup-block-fixed", "window-above-context", "sinks-above-context", "long-contexts",
        "target-layers-not-named", "unknown-keys",
    }  # fmt: skip
    found = {name for names, *_ in CASES for name in names}
    assert listed - {"not-reachable"} == found | from_start


@contextmanager
def serving(answers: dict[str, tuple[int, str]], key: str | None = None) -> Iterator[str]:
    """A server on 127.0.0.1 that gives these statuses and bodies; 404 for other paths."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, "no"))
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                status, body = 401, "{}"
            if status == 0:
                time.sleep(1)
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shown(server: ServerInfo) -> dict[str, tuple[int, str]]:
    return {"/server_info": (200, json.dumps(dict(server.info)))}


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(["doctor", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_status_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(shown(reading())) as url:
        for address in (url, f"{url}/v1/", url.removeprefix("http://")):
            status, out, err = doctor(capsys, address)
            assert (status, err) == (0, "") and out.endswith("\nnothing wrong found\n")
        found = json.loads(doctor(capsys, url, "--json")[1])
    assert found == {
        "url": url,
        "worker": "sglang-dflash",
        "worker_reason": None,
        "block_size": 8,
        "trained_block_size": 8,
        "window": None,
        "draft_kv_entries": 4160,
        "draft_kv_bytes": 3 << 20,
        "acceptance_length": 4.0,
        "verify_steps": 5000,
        "tokens_per_step": 3.992,
        "judged": True,
        "decodes_plainly": False,
        "step_milliseconds": 21.34,
        "step_shares": {"verify": 0.712, "propose": 0.149, "commit": 0.04, "host": 0.099},
        "break_even": [],
        "break_even_at_least": 1.23,
        "target_kv_tokens": None,
        "findings": [],
    }
    with serving(shown(reading(STARTED))) as url:
        assert json.loads(doctor(capsys, url, "--json")[1])["judged"] is False
    with serving(shown(reading({"undrafted_steps": 5000}))) as url:
        status, out, err = doctor(capsys, url)
        assert status == 1 and "\nmany-undrafted: " in out and "1 finding" in err
        (finding,) = json.loads(doctor(capsys, url, "--json")[1])["findings"]
    assert finding["name"] == "many-undrafted"
    assert set(finding) == {"name", "problem", "advice"}


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"/server_info": (200, "{}")}, "is not that of an SGLang server"),
        ({"/server_info": (200, "<html>")}, "is not that of an SGLang server"),
        ({}, "answers 404"),
        ({"/server_info": (0, "")}, "no answer within 0.3 s"),
    ],
)
def test_a_server_that_cannot_be_read_is_a_finding(
    answers: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(answers) as url:
        status, out, _ = doctor(capsys, url, "--timeout", "0.3")
    assert status == 1 and out.startswith("not-reachable: ") and words in out


# The processes of one run must collect the same ids: the port is chosen in the test.
@pytest.mark.parametrize("url", ["127.0.0.1:PORT", "http://", "http://256.0.0.1:x"])
def test_no_server_is_a_finding(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = url.replace("PORT", str(free_port()))
    status, out, _ = doctor(capsys, url, "--json")
    (finding,) = json.loads(out)["findings"]
    assert status == 1 and finding["name"] == "not-reachable"
    assert "cannot be reached" in finding["problem"] and "\n" not in finding["problem"]


def test_a_key_is_sent_and_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(shown(reading()), key="secret") as url:
        assert doctor(capsys, url, "--api-key", "secret")[0] == 0
        status, out, _ = doctor(capsys, url)
    assert status == 1 and "give --api-key" in out
