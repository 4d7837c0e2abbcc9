"""SGLang's front ends stream an answer in blocks as one in single tokens: the same chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.runtime_context import get_context

from tests.plugins.repairs import detokenized, front_ends
from tests.plugins.repairs.front_ends import FRONT_ENDS
from tests.plugins.repairs.tool_conversations import conversation, random_text, tokenizer
from tests.plugins.repairs.tool_formats import FORMATS, JSON_ARRAY, Format

NAMED = {"type": "function", "function": {"name": "search"}}
ANSWERS = 6
# Parsers of reasoning and of calls, `tool_choice`, and how the model writes calls.
CASES: list[tuple[str | None, str | None, Any, Format]] = [
    ("qwen3", "qwen25", "auto", FORMATS["qwen25"]),
    (None, "qwen25", "required", FORMATS["qwen25"]),
    ("deepseek-v3", "deepseekv3", "auto", FORMATS["deepseekv3"]),
    ("gpt-oss", "gpt-oss", "auto", FORMATS["gpt-oss"]),
    ("glm45", "glm45", "required", JSON_ARRAY),
    (None, "gigachat3", NAMED, JSON_ARRAY),
    (None, "llama3", "auto", FORMATS["llama3"]),
    ("minimax", "minimax-m2", "auto", FORMATS["minimax-m2"]),
    ("qwen3", None, "auto", FORMATS["qwen25"]),
]


@pytest.fixture(autouse=True)
def _published() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def random_answers(case: Any) -> Iterator[tuple[detokenized.Answer, list[int]]]:
    """Yield random answers with the sizes of their events."""
    reasoning, tools, _, form = case
    rng = random.Random(f"{reasoning} {tools}")
    for _ in range(ANSWERS):
        text = conversation(form, rng)
        if reasoning is not None and form is not JSON_ARRAY:
            text = f"<think>{random_text(rng)}</think>{text}"
        answer = detokenized.answer(tokenizer(1), text, rng)
        yield answer, detokenized.blocks(len(answer.ids), rng)


def told(
    front_end: Any, case: Any, answer: detokenized.Answer, sizes: list[int], rows: bool = True
) -> list[Any]:
    """Return what the front end sends to a client."""
    reasoning, tools, choice, _ = case
    (texts,) = detokenized.detokenize(tokenizer(1), [answer], [sizes])
    events = list(detokenized.events(answer, sizes, texts))
    parsers = {"reasoning_parser": reasoning, "tool_call_parser": tools}
    return front_end(front_ends.manager(tokenizer(1), parsers, events, rows), choice)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_blocks_are_told_as_single_tokens(front_end: Any, case: Any) -> None:
    for answer, sizes in random_answers(case):
        alone = [1] * len(answer.ids)
        expected = told(front_end, case, answer, alone)
        assert told(front_end, case, answer, sizes) == expected
        # Of single tokens nothing is changed.
        assert told(front_end, case, answer, alone, rows=False) == expected


def arguments(value: Any) -> str:
    """Join the arguments of all calls, under the names that the front ends give them."""
    if isinstance(value, list):
        return "".join(map(arguments, value))
    if not isinstance(value, dict):
        return ""
    own = (value.get(key) for key in ("arguments", "partial_json"))
    return "".join(one for one in own if isinstance(one, str)) + arguments(list(value.values()))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_calls_are_lost_without_the_rows(front_end: Any) -> None:
    """A call without arguments inside one block."""
    text = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    answer = detokenized.answer(tokenizer(1), text, random.Random(0))
    sizes = [1, len(answer.ids) - 1]
    kept, lost = (
        arguments(told(front_end, CASES[0], answer, sizes, rows)) for rows in (True, False)
    )
    assert "{}" in kept and "{}" not in lost
