"""Recorded conversations of a file: the messages of OpenAI's API, or ShareGPT's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

# ShareGPT's name of a speaker -> the role in a chat template.
_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def read_row(row: Mapping[str, Any]) -> list[Message] | None:
    """The messages of `{"messages": [...]}` or `{"conversations": [{"from": ..., "value": ...}]}`;
    None for another row.

    Raises:
        ValueError, TypeError, KeyError: a message is of no known form.
    """
    if "messages" in row:
        return [_message(message) for message in row["messages"]]
    if "conversations" in row:
        return [
            {"role": _role_of(turn["from"]), "content": _text(turn["value"])}
            for turn in row["conversations"]
        ]
    return None


def requests_of(messages: Sequence[Message]) -> list[int]:
    """Return where the requests of a conversation end: before each recorded answer, and at the end
    if the last message is to be answered."""
    ends = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if messages and messages[-1]["role"] in ("user", "tool"):
        ends.append(len(messages))
    # If several assistant messages follow each other, only the first one is requested.
    return [end for end in ends if messages[end - 1]["role"] in ("user", "tool")]


def _role_of(speaker: str) -> str:
    if speaker not in _ROLES:
        raise ValueError(f"from {speaker!r}: one of {', '.join(_ROLES)} is required")
    return _ROLES[speaker]


def _message(message: Mapping[str, Any]) -> Message:
    """Convert a message to the form of chat templates: text content, and call arguments that are
    not strings."""
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"role {role!r}: system, user, assistant or tool is required")
    converted = {**message, "role": role, "content": _text(message.get("content"))}
    if converted.get("tool_calls"):
        converted["tool_calls"] = [_call(call) for call in converted["tool_calls"]]
    return converted


def _call(call: Mapping[str, Any]) -> Message:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _text(content: object) -> str:
    """Return the text of a message's content; "" for a message that only calls tools."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        raise ValueError("only text content can be sent")
    return "".join(part["text"] for part in parts)
