"""The README's own command, with no flag and no environment variable beyond it; and the package's claims about its parts."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from sglang_dflash import cli
from sglang_dflash.bench.server import Server
from tests.engine import workload
from tests.engine.conftest import DFLASH, PAIR, Running


def test_generate_says_what_is_served(answers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for text, served in zip(
        workload.prompts()["demo"][:4], answers("dflash")["demo"][:4], strict=True
    ):
        assert (
            cli.main(
                [
                    "generate",
                    "--prompt",
                    text,
                    "--max-new-tokens",
                    str(workload.NEW_TOKENS),
                    "--json",
                ]
            )
            == 0
        )
        assert json.loads(capsys.readouterr().out)["tokens"] == served["output_ids"]


def test_the_readme_command_serves_in_bfloat16(running: Running) -> None:
    assert "TRITON_INTERPRET" not in os.environ
    running.stop()
    with Server(["--model-path", str(PAIR.target), *DFLASH]) as server:
        assert server.dflash()["draft_kv_dtype"] == "bfloat16"
        answers = [
            server.generate(text, temperature=0, max_new_tokens=40, ignore_eos=True)
            for text in workload.prompts()["demo"][:6]
        ]
        assert workload.acceptance_length(answers) > 2
