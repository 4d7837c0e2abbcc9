# ruff: noqa: RUF001 - the models have such characters in their tags
"""Formats of models' tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

Args = dict[str, Any]
# Name, arguments and place of a call -> its text.
Call = Callable[[str, Args, int], str]

# Their arguments are random values of the type that they are named for.
PARAMETERS = {
    "get_time": {},
    "search": {"text": "string", "limit": "integer"},
    "paint": {"color": "string", "on": "boolean", "points": "array", "more": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in kinds.items()},
            },
        },
    }
    for name, kinds in PARAMETERS.items()
]
WORDS = [
    "the sky",
    "is",
    "blue",
    "é",
    "日本",
    "🙂",
    "a < b",
    '"x"',
    "[1]",
    "{}",
    "it's;",
    "\n",
    "1, 2",
]


class Format(NamedTuple):
    """A model's.

    Attributes:
        call: one call.
        begin, between, end: of a group of calls.
        text: text outside of calls -> how it is framed.
        groups: whether an answer may have several groups of calls.
        most: calls in a group.
    """

    call: Call
    begin: str = ""
    between: str = ""
    end: str = ""
    text: Callable[[str], str] = str
    groups: bool = True
    most: int = 2


def pairs(form: str, between: str = "") -> Callable[[Args], str]:
    """Arguments one by one: strings as they are, other values as JSON."""

    def write(args: Args) -> str:
        return between.join(
            form.format(
                key=key,
                value=value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
                is_text=str(isinstance(value, str)).lower(),
                kind=PARAMETERS["paint"].get(key) or PARAMETERS["search"].get(key) or "string",
            )
            for key, value in args.items()
        )

    return write


def whole(args: Any) -> str:
    return json.dumps(args, ensure_ascii=False)


def of_json(name_key: str, args_key: str, **more: str) -> Call:
    """A JSON object with name and arguments."""
    return lambda name, args, _: whole({**more, name_key: name, args_key: args})


def around(begin: str, call: Call, end: str) -> Call:
    return lambda name, args, at: begin + call(name, args, at) + end


def tagged(begin: str, write: Callable[[Args], str], end: str) -> Call:
    """`begin` has {name} and may have {at}."""
    return lambda name, args, at: begin.format(name=name, at=at) + write(args) + end


GLM = pairs("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
QWEN = Format(around("<tool_call>\n", of_json("name", "arguments"), "\n</tool_call>"), between="\n")


def harmony(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|end|><|start|>assistant"


# Parser -> the format that it reads.
FORMATS: dict[str, Format] = {
    "deepseekv3": Format(
        tagged(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            whole,
            "\n```<｜tool▁call▁end｜>",
        ),
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
        groups=False,
    ),
    "glm45": Format(tagged("<tool_call>{name}\n", GLM, "</tool_call>"), between="\n"),
    "gpt-oss": Format(
        tagged(
            "<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>",
            whole,
            "<|call|>",
        ),
        between="<|start|>assistant",
        end="<|start|>assistant",
        text=harmony,
    ),
    "llama3": Format(
        of_json("name", "parameters"), begin="<|python_tag|>", between=";", groups=False
    ),
    "mistral": Format(
        of_json("name", "arguments"), begin="[TOOL_CALLS] [", between=", ", end="]", groups=False
    ),
    "qwen25": QWEN,
    "minimax-m2": Format(
        tagged(
            '<invoke name="{name}">\n',
            pairs('<parameter name="{key}">{value}</parameter>\n'),
            "</invoke>\n",
        ),
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
    ),
}
# What `tool_choice: required` and a named tool give where the parser's format is no grammar.
JSON_ARRAY = Format(
    of_json("name", "parameters"), begin="[", between=",", end="]", text=lambda _: "", groups=False
)
