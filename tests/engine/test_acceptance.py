"""Acceptance length: our worker, SGLang's built-in one and the offline loop agree."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_dflash.common.errors import Failed
from sglang_dflash.drafting.acceptance_length import VerifySteps, of_answer
from sglang_dflash.tools import cli
from sglang_dflash.tools.bench import load
from sglang_dflash.tools.bench.server import Server
from tests.engine import workload
from tests.engine.client import post
from tests.engine.servers import BUILTIN, DFLASH, SIMULATED


@pytest.mark.server(DFLASH)
def test_as_without_a_server(answers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`sglang-dflash generate`, over Transformers: the same tokens, in as many steps."""
    texts, got = (of["demo"][:5] for of in (workload.prompts(), answers(DFLASH, workload.run)))
    total = VerifySteps()
    for text, answer in zip(texts, got, strict=True):
        tokens = str(workload.NEW_TOKENS)
        command = ["generate", "--prompt", text, "--max-new-tokens", tokens, "--json"]
        assert cli.main(command) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["tokens"] == answer["output_ids"]
        total += of_answer(made["verify_steps"], len(made["tokens"]))
    expected = pytest.approx(total.acceptance_length, rel=0.01)
    assert workload.acceptance_length(got) == expected


@pytest.mark.server(BUILTIN)
@pytest.mark.recorded(DFLASH, workload.run)
def test_as_the_built_in_worker(answers: Any) -> None:
    ours = workload.halved(answers(DFLASH, workload.run))["demo"]
    builtin = answers(BUILTIN, workload.some_short_and_demo)["demo"]
    assert workload.acceptance_length(ours) == pytest.approx(
        workload.acceptance_length(builtin), rel=0.01
    )


@pytest.mark.server(DFLASH)
@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions"])
def test_an_openai_client_learns_it(path: str, server: Server) -> None:
    """SGLang's extension that docs/metrics.md names tells it; streamed, in the last event."""
    text = workload.prompts()["demo"][0]
    chat = {"messages": [{"role": "user", "content": text}]}
    body = {
        **(chat if "chat" in path else {"prompt": text}),
        "model": "default", "max_tokens": 16, "temperature": 0, "return_spec_tokens_details": True,
    }  # fmt: skip
    whole = post(server, path, body).json()
    lines = post(server, path, body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for answer in (whole, events[-1]):
        steps = answer["sglext"]["spec_tokens_details"]["spec_verify_ct"]
        assert 1 <= (whole["usage"]["completion_tokens"] - 1) / steps <= 8


@pytest.mark.server(SIMULATED)
def test_a_simulated_acceptance_needs_no_weights(server: Server) -> None:
    """SGLang's variable for timing: both checkpoints are config files only, and every step commits
    the configured number of tokens on average."""
    report = server.dflash()
    assert report["simulated_acceptance"] == 3.5
    answers = [
        server.generate("def f(", temperature=0, max_new_tokens=200, ignore_eos=True)["meta_info"]
        for _ in range(4)
    ]
    assert all(answer["completion_tokens"] == 200 for answer in answers)
    assert 3.2 < server.dflash()["acceptance_length"] < 3.8
    with pytest.raises(Failed, match=r"simulates an acceptance of 3\.5; restart it without"):
        load.endpoint(server.url)
