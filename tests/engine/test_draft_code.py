"""Python files in the folder of a draft that is served, inspected and generated with do not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash import cli
from sglang_dflash.bench.server import ServerConfig
from sglang_dflash.transformers_loop import load
from tests.engine import client
from tests.engine.nursery import ForkedServer
from tests.engine.session import ServerSession
from tests.serving.test_draft_code import CONFIG, MODEL, PAIR, TRUST, TracedDraft, mistral


@pytest.mark.long
def test_a_server_that_trusts_the_targets_code(tmp_path: Path, servers: ServerSession) -> None:
    draft = TracedDraft(tmp_path)
    draft.edit(auto_map={**CONFIG, **MODEL})
    mistral(draft)
    flags = ["--dtype", "float32", "--max-total-tokens", "4096"]
    servers.stop()
    config = ServerConfig(extra_args=tuple(draft.command(TRUST, *flags)))
    with ForkedServer(servers.nursery, config) as server:
        client.ask(server, "import os\n")
        # Our worker drafts with this folder's weights.
        assert server.dflash()["acceptance_length"] > 1
    assert not draft.mark.exists()


def test_inspect_and_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = TracedDraft(tmp_path)
    draft.edit(auto_map={**CONFIG, **MODEL})
    assert cli.main(["inspect", str(PAIR.target), str(draft.folder), "--offline"]) == 0
    load(str(PAIR.target), str(draft.folder))
    assert not draft.mark.exists()
