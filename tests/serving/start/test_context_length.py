"""A --context-length above the draft's own: SGLang reads the draft's config with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.serving.start.draft_files import LONGER_CONTEXT
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.errors import refused
from tests.tools.inspect.pairs import inspected

PAIR, FLAG = demo_pair("dense"), "--context-length"


@pytest.fixture
def draft(tmp_path: Path) -> str:
    """A draft that was made for requests of 512 tokens."""
    folder = shutil.copytree(PAIR.draft, tmp_path / "draft")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 512}))
    return str(folder)


def test_a_server_tells_what_helps(
    draft: str, resolve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ["--model-path", str(PAIR.target), "--speculative-draft-model-path", draft]
    command = [*pair, "--speculative-algorithm", "DFLASH"]
    with refused(FLAG, 1024, reason=f"is served, or set {LONGER_CONTEXT}=1"):
        resolve([*command, FLAG, "1024"])
    resolve(command)
    resolve([*command, FLAG, "512"])
    monkeypatch.setenv(LONGER_CONTEXT, "1")
    resolve([*command, FLAG, "1024"])


def test_inspect_warns(draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    def warned(*more: str) -> bool:
        warnings = inspected(capsys, str(PAIR.target), draft, *more)["warnings"]
        return any("the draft's max_position_embeddings is 512" in text for text in warnings)

    assert warned(FLAG, "1024") and not warned(FLAG, "512") and not warned()
