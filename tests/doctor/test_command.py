"""`sglang-dflash doctor` against a server that answers with constructed values."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_dflash import cli
from sglang_dflash.bench.server import free_port
from sglang_dflash.doctor.reading import series
from tests.doctor.test_findings import CASES, RETRACTED, reading

METRICS = "".join(
    f'# TYPE {name} counter\n{name}{{model_name="m",tp_rank="0"}} {values[0]}\n'
    for name, values in RETRACTED.items()
)
KEY = "secret"


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


def shown(info: Any) -> dict[str, tuple[int, str]]:
    return {"/server_info": (200, json.dumps(dict(info)))}


HEALTHY = shown(reading().info)


def doctor(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = cli.main(["doctor", *argv])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_healthy_server_is_status_0(suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(HEALTHY) as url:
        assert doctor(url + suffix, capsys=capsys) == (0, "nothing wrong found\n", "")
        assert doctor(url.removeprefix("http://"), capsys=capsys)[0] == 0


def test_a_few_steps_are_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    new = reading({"verify_steps": 7, "committed_tokens": 8})
    with serving(shown(new.info)) as url:
        status, out, _ = doctor(url, capsys=capsys)
    assert status == 0
    assert out.startswith("nothing wrong found; 7 verify steps are too few to judge the draft")


def test_each_finding_is_a_line_with_advice_and_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(shown(CASES["alarm"][1].info)) as url:
        status, out, err = doctor(url, capsys=capsys)
    problem, advice = out.splitlines()
    assert status == 1 and problem.startswith("acceptance-alarm: acceptance length 1.02")
    assert "another target" in advice and err == "sglang-dflash: doctor: 1 finding\n"


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with serving({**HEALTHY, "/metrics": (200, METRICS)}) as url:
        status, out, _ = doctor(url, "--json", capsys=capsys)
    (finding,) = json.loads(out)["findings"]
    assert status == 1 and finding["name"] == "retractions"
    assert set(finding) == {"name", "problem", "advice"}


NOT_READABLE = {
    "no SGLang server": ({"/server_info": (200, "{}")}, "is not that of an SGLang server"),
    "no JSON": ({"/server_info": (200, "<html>")}, "is not that of an SGLang server"),
    "another server": ({}, "answers 404"),
    "an error": ({"/server_info": (500, "{}")}, "answers 500"),
    "no answer": ({"/server_info": (0, "")}, "no answer within 0.3 s"),
}


@pytest.mark.parametrize(("answers", "words"), NOT_READABLE.values(), ids=NOT_READABLE)
def test_a_server_that_cannot_be_read_is_a_finding(
    answers: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(answers) as url:
        status, out, _ = doctor(url, "--timeout", "0.3", capsys=capsys)
    assert status == 1 and out.startswith("not-reachable: ") and words in out


@pytest.mark.parametrize(
    "url",
    [f"127.0.0.1:{free_port()}", "http://", "http://256.0.0.1:x"],
    ids=["no port", "no host", "no url"],
)
def test_no_server_is_a_finding(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = doctor(url, "--json", capsys=capsys)
    (finding,) = json.loads(out)["findings"]
    assert status == 1 and finding["name"] == "not-reachable"
    assert "cannot be reached" in finding["problem"] and "\n" not in finding["problem"]


def test_a_key_is_sent_and_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(HEALTHY, key=KEY) as url:
        assert doctor(url, "--api-key", KEY, capsys=capsys)[0] == 0
        status, out, _ = doctor(url, capsys=capsys)
    assert status == 1 and "give --api-key" in out


def test_series_of_several_ranks_are_read_without_labels() -> None:
    text = '# HELP a b\na{x="1 2",y="}"} 3\na{x="2"} 4.5\nb NaN\nc +Inf\n\nbroken\n'
    assert series(text) == {"a": [3.0, 4.5]}
