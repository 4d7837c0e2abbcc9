"""The README's own command, with no flag and no environment variable beyond it; and the package's claims about its parts."""

from __future__ import annotations

import os

from sglang_dflash.bench.server import Server
from tests.serving import workload
from tests.serving.conftest import DFLASH, PAIR, Running


def test_the_readme_command_serves_in_bfloat16(running: Running) -> None:
    assert "TRITON_INTERPRET" not in os.environ
    running.stop()
    with Server(["--model-path", str(PAIR.target), *DFLASH]) as server:
        assert server.dflash()["draft_kv_dtype"] == "bfloat16"
        answers = [server.generate(text, temperature=0, max_new_tokens=40, ignore_eos=True) for text in workload.prompts()["demo"][:6]]
        assert workload.acceptance_length(answers) > 2
