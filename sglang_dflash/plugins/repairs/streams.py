"""Adapted events of streamed answers, for front ends that fail on events of several tokens.

An event of `TokenizerManager.generate_request` holds all that the scheduler has sent since the last
one: one token of plain decoding, up to a block with drafts, and more if a client reads slowly or
with --stream-interval. The patches mark a request with the function that adapts its events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from sglang_dflash.plugins.repairs.token_events import TokenEvents

# An attribute of SGLang's request object.
MARK = "dflash_events"


def adapt_events(original: Any, manager: Any, obj: Any, *args: Any, **named: Any) -> Any:
    """Around `TokenizerManager.generate_request`: adapt the events of a marked request."""
    events = original(manager, obj, *args, **named)
    how = getattr(obj, MARK, None)
    return how(events, manager, obj) if how and obj.stream else events


def mark_chat(serving: Any, adapted: Any, request: Any, *_: Any) -> None:
    """Before `OpenAIServingChat._generate_chat_stream`, which streams chat completions and
    `/v1/messages`: mark requests whose answers are parsed."""
    parsed = (
        (serving.reasoning_parser and request.separate_reasoning)
        or serving._tool_call_parsing_active(request)
        or serving._encoding_output() is not None
    )
    if parsed:
        setattr(adapted, MARK, split_events)


def mark_response(serving: Any, _rid: str, _prompt: Any, adapted: Any, *_: Any, **__: Any) -> None:
    """Before `OpenAIServingResponses._generate_with_builtin_tools`: mark the request."""
    # gpt-oss parses tokens, not text.
    if not serving.use_harmony:
        setattr(adapted, MARK, split_events)


def mark_ollama(_serving: Any, adapted: Any, *_: Any) -> None:
    """Before the methods of `OllamaServing` that stream: mark the request."""
    setattr(adapted, MARK, send_last_text)


async def split_events(events: Any, manager: Any, obj: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield an event per token.

    SGLang's parsers of tool calls and reasoning expect that: many change their state once per call
    and lose the rest of an event. The order of text and calls within an event is lost, too.
    """
    answers: dict[int, TokenEvents] = {}
    async with aclosing(events):
        async for event in events:
            # A request with `n` has several answers.
            index = event.get("index", 0)
            if index not in answers:
                answers[index] = TokenEvents(manager, obj)
            for part in answers[index].split(event):
                yield part


async def send_last_text(events: Any, manager: Any, _obj: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield events with the whole text so far. The text of the last event is also sent in an event
    before it, because `OllamaServing` drops the text of the event that ends the answer."""
    text = ""
    async with aclosing(events):
        async for event in events:
            before, meta_info = text, event["meta_info"]
            text = text + event["text"] if manager.incremental_streaming_output else event["text"]
            if meta_info["finish_reason"] is not None and text != before:
                yield {**event, "text": text, "meta_info": {**meta_info, "finish_reason": None}}
            yield {**event, "text": text}
