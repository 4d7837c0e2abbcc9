# ruff: noqa: RUF001 - the models have such characters in their tags
"""Formats of models' tool calls, for every parser that SGLang registers, and random conversations
in these formats."""

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
DENSE_GLM = pairs("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>")
CODER = tagged(
    "<tool_call>\n<function={name}>\n",
    pairs("<parameter={key}>\n{value}\n</parameter>\n"),
    "</function>\n</tool_call>",
)
QWEN = Format(around("<tool_call>\n", of_json("name", "arguments"), "\n</tool_call>"), between="\n")
BEAM = Format(
    tagged(
        " to={name}<|channel|>analysis <|constrain|>xml<|message|>",
        pairs('<rfl:parameter name="{key}">\n{value}\n</rfl:parameter>'),
        "",
    ),
    between="<|end|><|start|>assistant",
    end="<|call|>",
    text=lambda text: f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant",
    groups=False,
)


def dsml(block: str, space: str = "") -> Format:
    """DeepSeek's since V3.2."""
    mark = f"｜DSML｜{space}"
    write = pairs(
        f'<{mark}parameter name="{{key}}" string="{{is_text}}">{{value}}</{mark}parameter>\n'
    )
    call = tagged(f'<{mark}invoke name="{{name}}">\n', write, f"</{mark}invoke>\n")
    return Format(call, begin=f"<{mark}{block}>\n", end=f"</{mark}{block}>", groups=False)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def python_call(name: str, args: Args, _: int) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})"


MINIMAX = "]<]minimax[>["


def minimax3(name: str, args: Args, _: int) -> str:
    def value(of: Any) -> str:
        if isinstance(of, list):
            return "".join(f"{MINIMAX}<item>{value(one)}{MINIMAX}</item>" for one in of)
        if isinstance(of, dict):
            return "".join(
                f"{MINIMAX}<{key}>{value(one)}{MINIMAX}</{key}>" for key, one in of.items()
            )
        return of if isinstance(of, str) else json.dumps(of)

    return f'{MINIMAX}<invoke name="{name}">{value(args)}{MINIMAX}</invoke>'


def harmony(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|end|><|start|>assistant"


JSON_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}

# Parser -> the format that it reads.
FORMATS: dict[str, Format] = {
    "apertus2509": Format(
        lambda name, args, _: whole({name: args}),
        begin="<|tools_prefix|>[",
        between=", ",
        end="]<|tools_suffix|>",
    ),
    "beam": BEAM,
    "cohere_command4": Format(
        of_json("tool_name", "parameters", tool_call_id="0"),
        begin="<|START_ACTION|>[",
        between=", ",
        end="]<|END_ACTION|>",
        groups=False,
    ),
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
    "deepseekv31": Format(
        tagged("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", whole, "<｜tool▁call▁end｜>"),
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        groups=False,
    ),
    "deepseekv32": dsml("function_calls"),
    "deepseekv4": dsml("tool_calls"),
    "deepseekv41": dsml("tool_calls", " "),
    "dots": Format(
        tagged(
            '<invoke name="{name}">\n',
            pairs('<parameter name="{key}">{value}</parameter>\n'),
            "</invoke>\n",
        ),
        begin="<dots_function_call>\n",
        end="</dots_function_call>",
    ),
    **dict.fromkeys(
        ("glm", "glm45", "ling3"),
        Format(tagged("<tool_call>{name}\n", GLM, "</tool_call>"), between="\n"),
    ),
    "glm47": Format(tagged("<tool_call>{name}", DENSE_GLM, "</tool_call>")),
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
    "k2_horizon": Format(
        tagged(
            "<ifm|tool_call>{name}\n",
            pairs("<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{value}</ifm|arg_value>\n"),
            "</ifm|tool_call>\n",
        ),
        begin="<ifm|tool_calls>\n",
        end="</ifm|tool_calls>",
        groups=False,
    ),
    "kimi_k2": Format(
        tagged(
            "<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>",
            whole,
            "<|tool_call_end|>",
        ),
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        groups=False,
    ),
    "kimi_k3": Format(
        tagged(
            '<|open|>call tool="{name}" index="{at}"<|sep|>',
            pairs(
                '<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
            ),
            "<|close|>call<|sep|>",
        ),
        begin="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        text=lambda text: f"<|open|>response<|sep|>{text}<|close|>response<|sep|>",
        groups=False,
    ),
    "lfm2": Format(
        python_call, begin="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>"
    ),
    "llama3": Format(
        of_json("name", "parameters"), begin="<|python_tag|>", between=";", groups=False
    ),
    "mimo": Format(CODER, between="\n"),
    "minicpm5": Format(
        tagged(
            '<function name="{name}">',
            pairs('<param name="{key}"><![CDATA[{value}]]></param>'),
            "</function>",
        )
    ),
    "mistral": Format(
        of_json("name", "arguments"), begin="[TOOL_CALLS] [", between=", ", end="]", groups=False
    ),
    "muse": Format(
        tagged(
            ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
            pairs('<atem:parameter name="{key}">{value}</atem:parameter>\n'),
            "</atem:invoke>\n</atem:function_calls><|eom|>",
        ),
        begin="<|start|>assistant",
        between="<|start|>assistant",
        text=lambda text: f"<|start|>assistant to=user<|message|>{text}<|eom|>",
    ),
    "poolside_v1": Format(tagged("<tool_call>{name}\n", GLM, "</tool_call>"), between="\n"),
    "pythonic": Format(python_call, begin="[", between=", ", end="]", groups=False),
    **dict.fromkeys(("qwen", "qwen25", "trinity"), QWEN),
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige"), Format(CODER, between="\n")),
    "spark25": Format(tagged("<tool_call>{name}\n", DENSE_GLM, "\n</tool_call>"), between="\n"),
    "step3": Format(
        tagged(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
            pairs('<steptml:parameter name="{key}">{value}</steptml:parameter>'),
            "</steptml:invoke><｜tool_call_end｜>\n",
        ),
        begin="<｜tool_calls_begin｜>\n",
        end="<｜tool_calls_end｜>",
        groups=False,
    ),
    "minimax-m2": Format(
        tagged(
            '<invoke name="{name}">\n',
            pairs('<parameter name="{key}">{value}</parameter>\n'),
            "</invoke>\n",
        ),
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
    ),
    "minimax-m3": Format(
        minimax3, begin=f"{MINIMAX}<tool_call>", between="\n", end=f"{MINIMAX}</tool_call>"
    ),
    "interns1": Format(
        around("<|action_start|> <|plugin|>\n", of_json("name", "parameters"), "<|action_end|>"),
        between="\n",
    ),
    "hermes": Format(around("<tool_call>", of_json("name", "arguments"), "</tool_call>")),
    "hunyuan": Format(
        tagged("<tool_call>{name}<tool_sep>\n", GLM, "</tool_call>\n"),
        begin="<tool_calls>\n",
        end="</tool_calls>",
        groups=False,
    ),
    "gigachat3": Format(
        of_json("name", "arguments"),
        begin="<|message_sep|>\n\nfunction call<|role_sep|>\n",
        groups=False,
        most=1,
    ),
    "gigachat35": Format(
        tagged(
            '<｜GCML｜invoke name="{name}">\n',
            pairs(
                '<｜GCML｜parameter name="{key}" string="{is_text}">{value}</｜GCML｜parameter>\n'
            ),
            "</｜GCML｜invoke>\n",
        ),
        begin="<｜GCML｜tool_calls>\n",
        end="</｜GCML｜tool_calls>",
        groups=False,
    ),
    "gemma4": Format(lambda name, args, _: f"<|tool_call>call:{name}{gemma(args)}<tool_call|>"),
    "inkling": Format(
        lambda name, args, _: (
            f"<|message_model|>{name}<|content_invoke_tool_json|>"
            + whole({"name": name, "args": args})
            + "<|end_message|>"
        ),
        text=lambda text: f"<|message_model|><|content_text|>{text}<|end_message|>",
    ),
    "iquest_q1": Format(tagged("<iquest_tool_call>{name}\n", GLM, "</iquest_tool_call>")),
    "response_template": Format(
        around("<call>", of_json("name", "arguments"), "</call>"), between="\n"
    ),
}
# What `tool_choice: required` and a named tool give where the parser's format is no grammar.
JSON_ARRAY = Format(
    of_json("name", "parameters"), begin="[", between=",", end="]", text=lambda _: "", groups=False
)
