"""The events of a streamed answer that a front end gets: those of
`TokenizerManager.generate_request`.

An event has all that the scheduler has sent since the last one: one token of plain decoding, a
block of a server with drafts, more if a client reads slowly or with --stream-interval. Some front
ends fail on more than one token. The rows mark their requests with a function that makes other
events of these.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from sglang_dflash.plugins.repairs.token_events import TokenEvents

# An attribute of SGLang's request object.
MARK = "dflash_events"


def adapt(original: Any, manager: Any, obj: Any, *args: Any, **named: Any) -> Any:
    """Around `TokenizerManager.generate_request`: the events as the request's front end needs
    them."""
    events = original(manager, obj, *args, **named)
    how = getattr(obj, MARK, None)
    return how(events, manager, obj) if how and obj.stream else events


def mark_chat(serving: Any, adapted: Any, request: Any, *_: Any) -> None:
    """Before `OpenAIServingChat._generate_chat_stream`, which streams chat completions, and for
    `/v1/messages`."""
    parsed = (
        (serving.reasoning_parser and request.separate_reasoning)
        or serving._tool_call_parsing_active(request)
        or serving._encoding_output() is not None
    )
    if parsed:
        setattr(adapted, MARK, one_token_each)


def mark_response(serving: Any, _rid: str, _prompt: Any, adapted: Any, *_: Any, **__: Any) -> None:
    """Before `OpenAIServingResponses._generate_with_builtin_tools`."""
    # gpt-oss has a parser of tokens.
    if not serving.use_harmony:
        setattr(adapted, MARK, one_token_each)


def mark_ollama(_serving: Any, adapted: Any, *_: Any) -> None:
    """Before the methods of `OllamaServing` that stream."""
    setattr(adapted, MARK, text_before_done)


async def one_token_each(events: Any, manager: Any, obj: Any) -> AsyncIterator[dict[str, Any]]:
    """An event per token.

    SGLang's parsers of tool calls and reasoning are written for that: many change their state once
    per call, and lose what else an event holds. Between parser and answer, the order of texts and
    calls of one event is lost, too.
    """
    answers: dict[int, TokenEvents] = {}
    async with aclosing(events):
        async for event in events:
            # Of the answers to a request with `n`.
            at = event.get("index", 0)
            if at not in answers:
                answers[at] = TokenEvents(manager, obj)
            for one in answers[at].split(event):
                yield one


async def text_before_done(events: Any, manager: Any, _obj: Any) -> AsyncIterator[dict[str, Any]]:
    """Whole texts, and the last one once more before the event that ends the answer, of which
    `OllamaServing` sends no text."""
    whole = ""
    async with aclosing(events):
        async for event in events:
            before, info = whole, event["meta_info"]
            whole = whole + event["text"] if manager.incremental_streaming_output else event["text"]
            if info["finish_reason"] is not None and whole != before:
                yield {**event, "text": whole, "meta_info": {**info, "finish_reason": None}}
            yield {**event, "text": whole}
