"""OpenAI's chat, whole and streamed. (Completions: test_examples.py.)"""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from sglang_dflash.bench.server import Server
from tests.engine.servers import DFLASH

pytestmark = pytest.mark.server(DFLASH)

QUESTION = [
    {
        "role": "user",
        "content": '"""A generally useful event scheduler class.\n\n'
        "Each instance of this class manages its own queue.\n",
    }
]


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")


def chat(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model="default", messages=QUESTION, temperature=0, **{"max_tokens": 32, **more}
    )


def test_chat_and_streamed_chat_agree(client: OpenAI) -> None:
    whole = chat(client)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 32
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True) if chunk.choices
    ]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 3
    several = chat(client, n=3).choices
    assert [one.message.content for one in several] == [whole.choices[0].message.content] * 3
