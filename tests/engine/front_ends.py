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

from sglang_dflash.tools.bench.server import Server
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
# A prompt of the pair, and of its answer how many tokens. Answers end after a call, which is inside
# a block: without arguments, the second, the third, with an argument; reasoning and calls that are
# none.
ASKED = [
    (PAIR.prompts[at], tokens)
    for at, tokens in ((14, 7), (14, 26), (14, 45), (11, 33), (1, 48), (9, 48))
]
# The calls of the first ones.
CALLS = [[("get_time", {})] * times for times in (1, 2, 3)] + [
    [("search", {"text": ", action, argument, "})]
]
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = [
    {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    {"name": "search", "parameters": TEXT},
]
FUNCTIONS = [{"type": "function", "function": tool} for tool in TOOLS]
# What differs from request to request, and how much of a prompt was cached.
UNIQUE = ("id", "item_id", "call_id", "created", "created_at", "usage", "total_duration", "model")


def _asked(
    server: Server, path: str, body: Callable[[str, int], dict[str, Any]], told: Any
) -> Answers:
    """All requests at once, whose body is made of a prompt and a number of tokens. `told` makes of
    the chunks of a stream what is compared."""

    def one(text: str, tokens: int, stream: bool) -> dict[str, Any]:
        asked = {**body(text, tokens), "stream": stream}
        with requests.post(f"{server.url}/{path}", json=asked, stream=True, timeout=120) as got:
            assert got.ok, got.text
            lines = [line for line in got.iter_lines() if line.startswith((b"data: {", b"{"))]
        found = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        return {"stream": stream, "told": told(found) if stream else [_common(*found)]}

    return together(lambda t=t, n=n, s=s: one(t, n, s) for t, n in ASKED for s in (True, False))


def _common(value: Any) -> Any:
    """Return the value without the keys that are unique to a request."""
    if isinstance(value, dict):
        return {key: _common(one) for key, one in value.items() if key not in UNIQUE}
    return [_common(one) for one in value] if isinstance(value, list) else value


def _messages_of(text: str) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": text}]}


def chat(server: Server) -> Answers:
    def body(text: str, tokens: int) -> dict[str, Any]:
        return _messages_of(text) | {"tools": FUNCTIONS, "temperature": 0, "max_tokens": tokens}

    return _asked(server, "v1/chat/completions", body, _common)


def messages(server: Server) -> Answers:
    """Anthropic's."""
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in TOOLS]

    def body(text: str, tokens: int) -> dict[str, Any]:
        return _messages_of(text) | {"tools": tools, "temperature": 0, "max_tokens": tokens}

    return _asked(server, "v1/messages", body, _common)


def responses(server: Server) -> Answers:
    def body(text: str, tokens: int) -> dict[str, Any]:
        return {
            "model": server.config.flags["--model-path"],
            "input": text,
            "tools": [{"type": "function", **tool} for tool in TOOLS],
            "temperature": 0,
            "max_output_tokens": tokens,
        }

    return _asked(server, "v1/responses", body, _common)


def completions(server: Server) -> Answers:
    def told(chunks: list[Any]) -> list[Any]:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return ["".join(one["text"] for one in choices), choices[-1]["finish_reason"]]

    def body(text: str, tokens: int) -> dict[str, Any]:
        return {"model": "default", "prompt": text, "temperature": 0, "max_tokens": tokens}

    return _asked(server, "v1/completions", body, told)


def ollama_chat(server: Server) -> Answers:
    def told(lines: list[Any]) -> list[Any]:
        return ["".join(one["message"]["content"] for one in lines), lines[-1]["done"]]

    def body(text: str, tokens: int) -> dict[str, Any]:
        return _messages_of(text) | {"options": {"temperature": 0, "num_predict": tokens}}

    return _asked(server, "api/chat", body, told)


def ollama_generate(server: Server) -> Answers:
    def told(lines: list[Any]) -> list[Any]:
        return ["".join(one["response"] for one in lines), lines[-1]["done"]]

    def body(text: str, tokens: int) -> dict[str, Any]:
        options = {"temperature": 0, "num_predict": tokens}
        return {"model": "default", "prompt": text, "options": options}

    return _asked(server, "api/generate", body, told)


def native(server: Server) -> Answers:
    """Each event continues the one before."""

    def told(events: list[Any]) -> list[Any]:
        texts = [event["text"] for event in events]
        assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
        last = events[-1]
        return [last["text"], last["output_ids"], last["meta_info"]["finish_reason"]]

    def body(text: str, tokens: int) -> dict[str, Any]:
        return {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}

    answers = _asked(server, "generate", body, told)
    for answer in answers:
        if not answer["stream"]:
            answer["told"] = told(answer["told"])
    return answers


# Whose answers are compared with plain decoding's, and nothing else.
COMPARED_ONLY = (completions, ollama_chat, ollama_generate, native)


def in_blocks(seen: Seen) -> None:
    """The drafts are as good as with the tokens' own texts: a call is inside a block."""
    assert seen.report["acceptance_length"] > 3


def calls_told(seen: Seen) -> None:
    """A stream has the calls that the answer has if it is not streamed."""
    for stream in (True, False):
        answers = [answer for answer in seen.ours if answer["stream"] is stream]
        assert [_calls(answer) for answer in answers[: len(CALLS)]] == CALLS


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
