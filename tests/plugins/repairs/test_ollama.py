"""Ollama's endpoints stream the whole text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sglang.srt.entrypoints.ollama.serving import OllamaServing

from sglang_dflash.plugins.repairs import streams
from tests.plugins.repairs import front_ends

TEXTS = ["One ", "two three ", "four."]


def streamed(kind: str, incremental: bool, rows: bool) -> list[dict[str, Any]]:
    events = []
    for i, text in enumerate(TEXTS):
        finish = {"type": "length"} if i == len(TEXTS) - 1 else None
        whole = text if incremental else "".join(TEXTS[: i + 1])
        events.append({"text": whole, "meta_info": {"id": "r", "finish_reason": finish}})
    manager = front_ends.manager(None, {}, events, rows)
    manager.incremental_streaming_output = incremental
    serving, asked = OllamaServing(manager), front_ends.adapted()

    async def read() -> list[dict[str, Any]]:
        streams.mark_ollama(serving, asked, None, "m")
        answer = await getattr(serving, f"_stream_{kind}_response")(asked, None, "m")
        return [json.loads(line) async for line in answer.body_iterator]

    return asyncio.run(read())


def texts(kind: str, answer: list[dict[str, Any]]) -> list[str]:
    return [one["response"] if kind == "generate" else one["message"]["content"] for one in answer]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("kind", ["chat", "generate"])
def test_the_whole_text_is_sent(kind: str, incremental: bool) -> None:
    answer = streamed(kind, incremental, rows=True)
    assert texts(kind, answer) == [*TEXTS, ""]
    assert [one["done"] for one in answer] == [False, False, False, True]


@pytest.mark.parametrize("kind", ["chat", "generate"])
def test_the_last_text_is_lost_without_the_rows(kind: str) -> None:
    assert texts(kind, streamed(kind, False, rows=False)) == [*TEXTS[:-1], ""]
    # With --incremental-streaming-output, more is.
    assert "".join(texts(kind, streamed(kind, True, rows=False))) != "".join(TEXTS[:-1])
