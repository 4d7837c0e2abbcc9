"""The same requests to every front end of a server, streamed and not: what a client is told.

The target writes calls of tools and reasoning (`checkpoints.other_texts`), which chat completions,
messages and responses take apart. Theirs is compared chunk by chunk, of the others the whole text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import requests

from sglang_dflash.bench.server import Server
from tests.engine.checks import Seen
from tests.engine.client import together
from tests.engine.servers import DFLASH_FLAGS, FILES, PAIR, PLAIN

TOLD_PLAIN = PLAIN.named("told-plain").having(
    model_path=f"{FILES}/other-texts",
    tool_call_parser="qwen25",
    # Without a tag it takes no answer for reasoning.
    reasoning_parser="deepseek-v3",
)
TOLD = TOLD_PLAIN.named("told").having(**DFLASH_FLAGS)

Answers = list[dict[str, Any]]
NEW_TOKENS = 48
# Calls without arguments, one with, reasoning, and calls that are none.
PROMPTS = [PAIR.prompts[i] for i in (14, 11, 1, 9)]
# Whose calls SGLang's parser takes for calls in a whole text, too.
WITH_CALLS = 2
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = [
    {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    {"name": "search", "parameters": TEXT},
]
FUNCTIONS = [{"type": "function", "function": tool} for tool in TOOLS]
# What differs from request to request, and how much of a prompt was cached.
UNIQUE = ("id", "item_id", "call_id", "created", "created_at", "usage", "total_duration", "model")


def _asked(server: Server, path: str, body: Callable[[str], dict[str, Any]], told: Any) -> Answers:
    """All requests at once. `told` makes of a response, or of a stream's, what is compared."""

    def one(text: str, stream: bool) -> dict[str, Any]:
        asked = {**body(text), "stream": stream}
        with requests.post(f"{server.url}/{path}", json=asked, stream=True, timeout=120) as got:
            assert got.ok, got.text
            lines = [line for line in got.iter_lines() if line.startswith((b"data: {", b"{"))]
        found = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        return {"stream": stream, "told": told(found) if stream else [_common(*found)]}

    return together(lambda t=t, s=s: one(t, s) for t in PROMPTS for s in (True, False))


def _common(value: Any) -> Any:
    """What is not unique to a request."""
    if isinstance(value, dict):
        return {key: _common(one) for key, one in value.items() if key not in UNIQUE}
    return [_common(one) for one in value] if isinstance(value, list) else value


def _messages_of(text: str) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": text}]}


def chat(server: Server) -> Answers:
    more = {"tools": FUNCTIONS, "temperature": 0, "max_tokens": NEW_TOKENS}
    return _asked(server, "v1/chat/completions", lambda text: _messages_of(text) | more, _common)


def messages(server: Server) -> Answers:
    """Anthropic's."""
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in TOOLS]
    more = {"tools": tools, "temperature": 0, "max_tokens": NEW_TOKENS}
    return _asked(server, "v1/messages", lambda text: _messages_of(text) | more, _common)


def responses(server: Server) -> Answers:
    more = {
        "model": server.config.flags["--model-path"],
        "tools": [{"type": "function", **tool} for tool in TOOLS],
        "temperature": 0,
        "max_output_tokens": NEW_TOKENS,
    }
    return _asked(server, "v1/responses", lambda text: {"input": text, **more}, _common)


def completions(server: Server) -> Answers:
    def told(chunks: list[Any]) -> list[Any]:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return ["".join(one["text"] for one in choices), choices[-1]["finish_reason"]]

    more = {"model": "default", "temperature": 0, "max_tokens": NEW_TOKENS}
    return _asked(server, "v1/completions", lambda text: {"prompt": text, **more}, told)


OLLAMA: dict[str, Any] = {
    "model": "default",
    "options": {"temperature": 0, "num_predict": NEW_TOKENS},
}


def ollama_chat(server: Server) -> Answers:
    def told(lines: list[Any]) -> list[Any]:
        return ["".join(one["message"]["content"] for one in lines), lines[-1]["done"]]

    return _asked(server, "api/chat", lambda text: _messages_of(text) | OLLAMA, told)


def ollama_generate(server: Server) -> Answers:
    def told(lines: list[Any]) -> list[Any]:
        return ["".join(one["response"] for one in lines), lines[-1]["done"]]

    return _asked(server, "api/generate", lambda text: {"prompt": text, **OLLAMA}, told)


def native(server: Server) -> Answers:
    """Each event continues the one before."""

    def told(events: list[Any]) -> list[Any]:
        texts = [event["text"] for event in events]
        assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
        last = events[-1]
        return [last["text"], last["output_ids"], last["meta_info"]["finish_reason"]]

    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    answers = _asked(
        server, "generate", lambda text: {"text": text, "sampling_params": sampling}, told
    )
    for answer in answers:
        if not answer["stream"]:
            answer["told"] = told(answer["told"])
    return answers


def in_blocks(seen: Seen) -> None:
    """The drafts are as good as with the tokens' own texts: a call is inside a block."""
    assert seen.report["acceptance_length"] > 3


def calls_told(seen: Seen) -> None:
    """A stream has the calls that the answer has if it is not streamed."""
    streamed, whole = ([a for a in seen.ours if a["stream"] is kind] for kind in (True, False))
    calls = [_calls(answer) for answer in streamed[:WITH_CALLS]]
    assert calls == [_calls(answer) for answer in whole[:WITH_CALLS]]
    assert calls[0] == [("get_time", {})] * 3
    ((name, args),) = calls[1]
    assert name == "search" and list(args) == ["text"]


def _calls(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments."""
    told, calls = answer["told"], list[list[str]]()
    # A response as a whole is the last chunk of its stream, too.
    last = told[-1].get("response", told[-1])
    for value in _objects(last.get("output", told)):
        if value.get("name"):
            calls.append([value["name"], ""])
        if "input" in value and not answer["stream"]:
            calls[-1][1] += json.dumps(value["input"])
        if found := value.get("arguments") or value.get("partial_json"):
            calls[-1][1] += found
    return [(name, json.loads(args)) for name, args in calls]


def _objects(value: Any) -> list[dict[str, Any]]:
    """All objects, in order."""
    if isinstance(value, list):
        return [found for one in value for found in _objects(one)]
    if not isinstance(value, dict):
        return []
    return [value, *_objects(list(value.values()))]
