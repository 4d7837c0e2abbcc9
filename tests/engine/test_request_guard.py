"""The request guard on a server: what it refuses, what it leaves, and what happens without it."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_dflash.tools.bench.server import Server
from tests.engine import client, workload
from tests.engine.bad_requests import ENDS, ENDS_PLAIN, FAILS, REFUSED, Row
from tests.engine.engine_calls import CALLS
from tests.engine.servers import DFLASH, PAIR, PLAIN, WITHOUT_REPAIRS, ServerConfig
from tests.engine.session import ServerSession

OFF = DFLASH.named("unrepaired").with_env(**WITHOUT_REPAIRS)
PLAIN_OFF = PLAIN.named("plain-unrepaired").with_env(**WITHOUT_REPAIRS)


def send(server: Server, row: Row) -> requests.Response:
    path, body, _ = row
    return requests.post(f"{server.url}/{path}", json=body, timeout=30)


@pytest.mark.parametrize("config", [DFLASH, PLAIN], ids=str)
def test_bad_requests_are_a_400_that_names_field_value_and_bound(
    config: ServerConfig, server: Server
) -> None:
    """They leave no trace: outputs are as before, and nothing stays held."""
    prompts = workload.prompts()["demo"][:4]

    def outputs() -> list[Any]:
        return [client.ask(server, prompt)["output_ids"] for prompt in prompts]

    before, wrong = outputs(), {}
    for name, row in REFUSED.items():
        answer = send(server, row)
        if answer.status_code != 400 or not all(word in answer.text for word in row[2]):
            wrong[name] = answer.status_code, answer.text[:300]
    assert not wrong
    client.at_rest(server)
    assert outputs() == before


@pytest.mark.server(DFLASH)
def test_a_profile_is_made_and_one_that_cannot_be_made_is_an_error(
    server: Server, tmp_path: Path
) -> None:
    """No GPU can be profiled here. A later step, with the profile by stage, ends nothing either."""

    def ask(action: str, **body: Any) -> int:
        body = {"output_dir": str(tmp_path), **body} if action == "start" else {}
        return requests.post(f"{server.url}/{action}_profile", json=body, timeout=60).status_code

    prompt = workload.prompts()["demo"][0]
    before = client.ask(server, prompt)["output_ids"]
    for activity in ("GPU", "MEM"):
        assert ask("start", activities=[activity]) == 500
        assert ask("start", activities=[activity], num_steps=2, profile_by_stage=True) == 200
        assert client.ask(server, prompt)["output_ids"] == before
    assert not list(tmp_path.iterdir())
    assert ask("start", activities=["CPU"]) == 200
    assert client.ask(server, prompt)["output_ids"] == before
    assert ask("stop") == 200
    assert [file.name for file in tmp_path.glob("*.trace.json.gz")]


@pytest.mark.server(DFLASH)
def test_a_streamed_bad_request_ends_with_the_error(server: Server) -> None:
    """SGLang has sent status 200 by then; the event holds the 400."""
    path, body, words = ENDS["top_k 2**40"]
    answer = requests.post(f"{server.url}/{path}", json={**body, "stream": True}, timeout=30)
    error = json.loads(answer.text.split("data: ")[1])["error"]
    assert error["code"] == 400 and all(word in error["message"] for word in words)


ALLOWED: dict[str, dict[str, Any]] = {
    "the last token": {"input_ids": [1023, 0]},
    "all logprobs": {"text": "x", "return_logprob": True, "top_logprobs_num": 1024},
    "logprobs of the prompt": {"text": "x", "return_logprob": True, "logprob_start_len": 0},
    "a start that is not used": {"text": "x", "logprob_start_len": -5},
    "top_k": {"text": "x", "sampling_params": {"top_k": 2**31 - 1, "max_new_tokens": 3}},
    "all": {"text": "x", "sampling_params": {"top_k": -1, "n": 2, "max_new_tokens": 3}},
    "stop": {"text": "x", "sampling_params": {"stop_regex": "[a-z]+;"}},
    "a stop outside the vocabulary": {
        "text": "x",
        "sampling_params": {"stop_token_ids": [5000], "min_new_tokens": 2, "max_new_tokens": 3},
    },
    "lists": {"text": ["x", "y"], "return_logprob": [True, False], "sampling_params": [{}, {}]},
    "recursion that ends": {
        "text": "x",
        "sampling_params": {"ebnf": 'root ::= "(" root ")" | "a"', "max_new_tokens": 8},
    },
    "a recursive schema": {
        "text": "x",
        "sampling_params": {
            "json_schema": '{"type":"object","properties":{"a":{"$ref":"#"}}}',
            "max_new_tokens": 8,
        },
    },
}


@pytest.mark.server(DFLASH)
def test_requests_at_the_bounds_are_served(server: Server) -> None:
    answers = {
        name: requests.post(f"{server.url}/generate", json=body, timeout=60)
        for name, body in ALLOWED.items()
    }
    assert not {name: a.text[:300] for name, a in answers.items() if a.status_code != 200}


CHAIN = "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(1600)) + '\na1600 ::= "x"'
NESTED = '{"type": "array", "items": ' * 60 + "{}" + "}" * 60
SLOW: dict[str, dict[str, Any]] = {
    "chains": {"sampling_params": [{"ebnf": CHAIN} for i in range(10)]},
    "a nested schema": {"sampling_params": [{"json_schema": NESTED}] * 10},
    "stops": {"sampling_params": [{"stop": [f"{i:>60}" for i in range(128)]}] * 10},
    "patterns": {"sampling_params": [{"stop_regex": [f"{i}(a|b)+c" for i in range(128)]}] * 10},
    "biases": {"sampling_params": [{"logit_bias": {str(i): 1.0 for i in range(1024)}}] * 10},
    "choices": {"sampling_params": [{"n": 8}] * 10},
    # All tokens of the answer are one of a few letters.
    "a pattern": {
        "sampling_params": [
            {"stop_regex": "([a-z]+[a-z]+)+9", "regex": "[a-z]{60,}", "max_new_tokens": 64}
        ]
        * 10
    },
}


@pytest.mark.server(DFLASH)
def test_no_request_blocks_the_server(server: Server) -> None:
    """/health waits no second longer while the largest requests are checked that are let in."""
    began, longest = time.monotonic(), dict[str, float]()
    assert requests.get(f"{server.url}/health", timeout=60).ok
    # SGLang looks once a second whether the scheduler has answered.
    idle = time.monotonic() - began
    with ThreadPoolExecutor(1) as pool:
        for name, body in SLOW.items():
            texts = {"text": [f"x = {i}" for i in range(10)]}
            for params in body["sampling_params"]:
                params.setdefault("max_new_tokens", 1)
            url = f"{server.url}/generate"
            sent, times = pool.submit(requests.post, url, json=body | texts, timeout=120), [0.0]
            while not sent.done():
                began = time.monotonic()
                assert requests.get(f"{server.url}/health", timeout=60).ok
                times.append(time.monotonic() - began)
                time.sleep(0.02)
            assert sent.result().status_code in (200, 400), sent.result().text[:300]
            longest[name] = max(times)
    print({name: round(seconds, 2) for name, seconds in longest.items()})
    assert max(longest.values()) < idle + 1


ENDED = {"empty text": PLAIN_OFF}
SELDOM = {**dict.fromkeys(set(ENDS) - set(ENDED), OFF), **dict.fromkeys(ENDS_PLAIN, PLAIN_OFF)}


@pytest.mark.parametrize(
    "name", [*ENDED, *(pytest.param(name, marks=pytest.mark.long) for name in sorted(SELDOM))]
)
def test_the_server_ends_without_the_guard(name: str, servers: ServerSession) -> None:
    """The requests of `ENDS` are what they are called. Each needs a server of its own."""
    config = {**ENDED, **SELDOM}[name]
    with servers.own(config) as server:
        if config == PLAIN_OFF:
            answers = {name: send(server, row).status_code for name, row in FAILS.items()}
            assert {k: v for k, v in answers.items() if v != 500} == {}
        # The first may be answered: what ends the server is a hit in the prefix cache, or which
        # requests of a batch meet in a prefill.
        with suppress(requests.ConnectionError):
            for _ in range(10):
                send(server, {**ENDS, **ENDS_PLAIN}[name])
        deadline = time.monotonic() + 30
        while server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server.process.poll() not in (None, 0)


ENGINE = {
    "model_path": str(PAIR.target),
    "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": str(PAIR.draft),
    "dtype": "float32",
    "max_total_tokens": 8192,
}


def test_engine_generate_raises_a_value_error(servers: ServerSession, tmp_path: Path) -> None:
    servers.stop()
    command = ["tests.engine.engine_calls", json.dumps(ENGINE)]
    status, lines = servers.nursery.run(*command, log=tmp_path / "log")
    assert status == 0, lines[-20:]
    (line,) = [line for line in lines if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["same"]
    for name, (_, message) in CALLS.items():
        error = result["errors"][name]
        assert error.startswith("ValueError: ") and message in error, name
