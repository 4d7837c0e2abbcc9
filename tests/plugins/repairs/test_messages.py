"""Calls of tools in answers of `/v1/messages`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import ValidationError
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse

from sglang_dflash.plugins.repairs.messages import clear_other_arguments
from tests.patches.originals import original

CONVERT = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_response"
SERVING: Any = AnthropicServing.__new__(AnthropicServing)


def answer(*arguments: str | None) -> ChatCompletionResponse:
    """A chat completion that calls a tool with each of these."""
    calls = [
        {"id": f"call-{at}", "function": {"name": "f", "arguments": given}}
        for at, given in enumerate(arguments)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return ChatCompletionResponse(id="a", model="m", choices=[choice], usage=usage)


@pytest.mark.parametrize("arguments", ("[1, 2]", '"text"', "5", "null", "true", "NaN"))
def test_arguments_that_are_no_object_are_a_500_without_the_row(
    arguments: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = answer('{"a": 1}', arguments, '{"a": ', None)
    with pytest.raises(ValidationError):
        original(CONVERT)(SERVING, response)
    with caplog.at_level(logging.WARNING, "sglang_dflash.plugins.repairs.messages"):
        clear_other_arguments(SERVING, response)
    blocks = original(CONVERT)(SERVING, response).content
    assert [block.input for block in blocks] == [{"a": 1}, {}, {}, {}]
    assert len([line for line in caplog.messages if "no JSON object" in line]) == 1


def test_an_answer_without_calls_stays() -> None:
    for response in (answer(), answer().model_copy(update={"choices": []})):
        before = response.model_dump()
        clear_other_arguments(SERVING, response)
        assert response.model_dump() == before
