"""Shared by these tests: toy models as facts, a published pair, and the command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_dflash.checkpoint.published import ModelFacts
from sglang_dflash.drafting.options import Options
from sglang_dflash.tools import cli
from sglang_dflash.tools.inspect.report import inspect
from sglang_dflash.tools.inspect.serving import Serving

SERVING = Serving(kv_memory_gib=1)
PAIR = ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")


def facts(config: dict[str, Any], weight_bytes: int | None = 0) -> ModelFacts:
    return ModelFacts("a model", config, weight_bytes, "a test")


def found_of(
    target: dict[str, Any],
    draft: dict[str, Any],
    options: Options | None = None,
    serving: Serving = SERVING,
) -> dict[str, Any]:
    """The report of a toy pair."""
    return inspect(facts(target), facts(draft), options or Options(), serving)


def inspected(
    capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0
) -> dict[str, Any]:
    """The report that `sglang-dflash inspect` prints, whose exit status is `status`."""
    assert cli.main(["inspect", "--offline", "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error that `sglang-dflash inspect` prints."""
    assert cli.main(["inspect", *arguments, "--offline"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("sglang-dflash: ")
    return shown.err
