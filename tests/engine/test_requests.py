"""OpenAI's chat, whole and streamed. (Completions: test_examples.py.)"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from openai import OpenAI

from sglang_dflash.bench.server import Server
from tests.engine.servers import DFLASH

QUESTION = (
    '"""A generally useful event scheduler class.\n\n'
    "Each instance of this class manages its own queue.\n"
)


@pytest.mark.server(DFLASH)
def test_chat_and_streamed_chat_agree(server: Server) -> None:
    chat: Any = functools.partial(
        OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY").chat.completions.create,
        model="default", messages=[{"role": "user", "content": QUESTION}], temperature=0,
        max_tokens=32,
    )  # fmt: skip
    whole = chat()
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 32
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(stream=True) if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 3
    several = chat(n=3).choices
    assert [one.message.content for one in several] == [whole.choices[0].message.content] * 3
