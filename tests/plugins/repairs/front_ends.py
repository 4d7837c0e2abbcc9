"""SGLang's front ends on events that a test makes, without the processes behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.context import SimpleContext
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    RequestResponseMetadata,
    ResponsesRequest,
)
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.parser.template_manager import TemplateManager

from sglang_dflash.plugins.repairs import streams
from tests.plugins.repairs import detokenized
from tests.plugins.repairs.tool_formats import TOOLS

Events = list[dict[str, Any]]
# What differs from answer to answer.
UNIQUE = ("id", "item_id", "call_id", "created", "created_at", "response_id")
USER: list[Any] = [{"role": "user", "content": "x"}]


def manager(tokenizer: Any, parsers: dict[str, str | None], events: Events, rows: bool) -> Any:
    """SGLang's `TokenizerManager` whose answers are these events, with our rows or without."""
    made = detokenized.manager(tokenizer)
    hf_config = SimpleNamespace(model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    made.model_config = SimpleNamespace(
        hf_config=hf_config,
        hf_text_config=hf_config,
        is_multimodal=False,
        context_len=4096,
        get_default_sampling_params=dict,
    )
    made.served_model_name, made.server_args = "m", None
    made.config_value = parsers.get

    async def sent(_manager: Any, _obj: Any, _request: Any = None) -> AsyncIterator[dict[str, Any]]:
        for event in events:
            yield event

    def generate(obj: Any, request: Any = None) -> Any:
        return streams.adapt_events(sent, made, obj, request) if rows else sent(made, obj, request)

    made.generate_request = generate
    return made


def adapted() -> GenerateReqInput:
    params = {"skip_special_tokens": False}
    return GenerateReqInput(input_ids=[1], sampling_params=params, stream=True)


def chat_request(tool_choice: Any, **more: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        model="m", messages=USER, tools=TOOLS, tool_choice=tool_choice, stream=True, **more
    )


def chat(manager: Any, tool_choice: Any, **more: Any) -> list[Any]:
    """`/v1/chat/completions`."""
    serving = OpenAIServingChat(manager, TemplateManager())
    asked, request = adapted(), chat_request(tool_choice, **more)
    streams.mark_chat(serving, asked, request, None)
    return told(serving._generate_chat_stream(asked, request, None))  # type: ignore[arg-type]


def messages(manager: Any, tool_choice: Any) -> list[Any]:
    """`/v1/messages`."""
    serving = OpenAIServingChat(manager, TemplateManager())
    asked, request = adapted(), chat_request(tool_choice)
    streams.mark_chat(serving, asked, request, None)
    own = AnthropicMessagesRequest(model="m", messages=USER, max_tokens=9)
    anthropic = AnthropicServing(serving)
    return told(anthropic._generate_anthropic_stream(asked, request, own, None))  # type: ignore[arg-type]


def responses(manager: Any, tool_choice: Any) -> list[Any]:
    """`/v1/responses`."""
    serving = OpenAIServingResponses(manager, TemplateManager())
    if isinstance(tool_choice, dict):
        tool_choice = {"type": "function", "name": tool_choice["function"]["name"]}
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    request = ResponsesRequest(
        model="m", input="x", tools=tools, tool_choice=tool_choice, stream=True
    )
    asked = adapted()
    streams.mark_response(serving, "r", [], asked, {}, SimpleContext())
    found = serving._generate_with_builtin_tools("r", [], asked, {}, SimpleContext())
    return told(
        serving.responses_stream_generator_non_harmony(
            request, {}, found, "m", None, RequestResponseMetadata(request_id="r"),
            require_reasoning=False,
        )
    )  # fmt: skip


FRONT_ENDS: tuple[Callable[..., list[Any]], ...] = (chat, messages, responses)


def told(chunks: AsyncIterator[str]) -> list[Any]:
    """The data of all server-sent events, without what is unique to an answer."""

    async def every() -> list[str]:
        return [chunk async for chunk in chunks]

    lines = "".join(asyncio.run(every())).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [line if line == "[DONE]" else common(json.loads(line)) for line in data]


def common(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: common(one) for key, one in value.items() if key not in UNIQUE}
    return [common(one) for one in value] if isinstance(value, list) else value
