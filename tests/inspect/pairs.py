"""Shared by these tests: toy models as facts, published pairs, and the command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_dflash import cli
from sglang_dflash.facts.published import ModelFacts

PUBLISHED_PAIRS = [
    ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash"),
    ("Qwen/Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash"),
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash@5-layers"),
    ("Qwen/Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash@8-layers"),
    ("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash"),
    ("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash"),
    ("Qwen/Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash"),
    ("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash"),
    ("Qwen/Qwen3.5-122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash"),
    ("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
    ("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash"),
    ("moonshotai/Kimi-K2.5", "z-lab/Kimi-K2.5-DFlash"),
]


def facts(
    config: dict[str, Any] | None, weight_bytes: int | None = 0, kv: int | None = None
) -> ModelFacts:
    return ModelFacts("a model", config, weight_bytes, kv, "a test")


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The report that `sglang-dflash inspect` prints."""
    assert cli.main(["inspect", *arguments, "--offline", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error that `sglang-dflash inspect` prints."""
    assert cli.main(["inspect", *arguments, "--offline"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("sglang-dflash: ")
    return shown.err
