"""Our commands as the README prints them, with no flag and no environment variable added."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from sglang_dflash import cli
from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.servers import DFLASH, DFLASH_FLAGS, PAIR, ServerConfig
from tests.engine.session import ServerSession

AS_PRINTED = ServerConfig(name="as-printed").having(model_path=PAIR.target, **DFLASH_FLAGS)


@pytest.mark.server(DFLASH)
def test_generate_prints_what_is_served(answers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served = answers(DFLASH, workload.run)["demo"][:4]
    for text, answer in zip(workload.prompts()["demo"][:4], served, strict=True):
        tokens = str(workload.NEW_TOKENS)
        command = ["generate", "--prompt", text, "--max-new-tokens", tokens, "--json"]
        assert cli.main(command) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == answer["output_ids"]


def test_the_readme_command_serves_in_bfloat16(servers: ServerSession) -> None:
    assert "TRITON_INTERPRET" not in os.environ
    servers.stop()
    with Server(AS_PRINTED) as server:
        assert server.dflash()["draft_kv_dtype"] == "bfloat16"
        answers = [
            server.generate(text, temperature=0, max_new_tokens=40, ignore_eos=True)
            for text in workload.prompts()["demo"][:6]
        ]
        assert workload.acceptance_length(answers) > 2
