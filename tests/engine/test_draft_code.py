"""Python files of a draft that is served, inspected and generated with do not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.tools import cli
from sglang_dflash.tools.bench.server import Server, ServerConfig
from sglang_dflash.tools.transformers_loop import load
from tests.broken_drafts import server_flags
from tests.engine import client
from tests.engine.session import ServerSession
from tests.serving.start.test_draft_code import MODEL, PAIR, TRUST, TracedDraft, mistral


@pytest.mark.long
def test_a_server_that_trusts_the_targets_code(tmp_path: Path, servers: ServerSession) -> None:
    """The draft is given by name, as in published commands; processes are the test's own."""
    draft = TracedDraft(tmp_path)
    draft.edit(auto_map=MODEL)
    mistral(draft)
    name = draft.publish(tmp_path / "hub", "someone/mistral-large-3")
    flags = server_flags(TRUST, "--dtype", "float32", "--max-total-tokens", "4096", draft=name)
    folders = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_MODULES_CACHE": str(tmp_path / "hf")}
    servers.stop()
    config = ServerConfig(extra_args=tuple(flags), env={**folders, "HF_HUB_OFFLINE": "1"})
    with Server(config) as server:
        client.ask(server, "import os\n")
        # Our worker drafts with these weights.
        assert server.dflash()["acceptance_length"] > 1
    assert not draft.mark.exists()


def test_inspect_and_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = TracedDraft(tmp_path)
    draft.edit(auto_map=MODEL)
    assert cli.main(["inspect", str(PAIR.target), str(draft.folder), "--offline"]) == 0
    load(str(PAIR.target), str(draft.folder))
    assert not draft.mark.exists()
