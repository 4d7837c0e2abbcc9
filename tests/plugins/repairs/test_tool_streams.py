"""A streamed answer with tool calls is the same, however many tokens an event holds: for every
parser of tool calls that SGLang registers, that of one token per event."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from transformers import PreTrainedTokenizerFast

from tests.conftest import FUZZ
from tests.plugins.repairs import detokenized
from tests.plugins.repairs.detokenized import streamed
from tests.plugins.repairs.tool_conversations import conversation
from tests.plugins.repairs.tool_formats import FORMATS, JSON_ARRAY, JSON_TEMPLATE, TOOLS

ANSWERS = 300 * FUZZ
REGISTERED = FunctionCallParser.ToolCallParserEnum
# Names of the same parser are tested once, by the first of them.
PARSERS = {parser: name for name, parser in reversed(REGISTERED.items())}.values()
TOOL_LIST = [Tool.model_validate(tool) for tool in TOOLS]


@functools.cache
def tokenizer(step: int) -> PreTrainedTokenizerFast:
    rng = random.Random(0)
    every = [*FORMATS.values(), JSON_ARRAY]
    texts = (conversation(form, rng) for form in every for _ in range(30))
    return detokenized.tokenizer_of(texts, step)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Parsers log every call of what is no tool."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def parsed(name: str, texts: list[str]) -> tuple[str, dict[int, list[str]]]:
    """Text and calls, with name and arguments, of a stream of these texts."""
    got: list[tuple[str | None, Any]] = []
    if name == "json-array":
        array = JsonArrayParser()
        results = [array.parse_streaming_increment(text, TOOL_LIST) for text in texts]
        got += [(one.normal_text, one.calls) for one in (*results, array.finish(TOOL_LIST))]
    else:
        template = SimpleNamespace(response_template=JSON_TEMPLATE)
        own = template if name == "response_template" else None
        parser = FunctionCallParser(TOOL_LIST, name, tokenizer=own)
        got += [parser.parse_stream_chunk(text) for text in texts]
        got.append(parser.parse_stream_end())
    calls: dict[int, list[str]] = {}
    for call in (call for _, new in got for call in new):
        whole = calls.setdefault(call.tool_index, ["", ""])
        whole[0] += call.name or ""
        whole[1] += call.parameters
    return "".join(text or "" for text, _ in got), calls


def test_every_registered_parser_has_a_format() -> None:
    assert set(FORMATS) == set(REGISTERED)


def compared(name: str, step: int) -> tuple[list[list[str]], int]:
    """The answers, in blocks, that differ from those in single tokens, and the number of calls."""
    rng, form = random.Random(f"{name} {step}"), FORMATS.get(name, JSON_ARRAY)
    texts = [conversation(form, rng) for _ in range(ANSWERS // 2)]
    differing, found = [], 0
    for alone, blocks in streamed(tokenizer(step), texts, rng):
        expected = parsed(name, alone)
        if parsed(name, blocks) != expected:
            differing.append(blocks)
        found += len(expected[1])
    return differing, found


@pytest.mark.parametrize("name", [*PARSERS, "json-array"])
def test_blocks_give_the_calls_of_single_tokens(name: str) -> None:
    """Compare 300 random answers in events of 1 to 16 tokens. All tags are single tokens, or half
    are: some parsers find no others."""
    (differing, found), (more, _) = compared(name, 1), compared(name, 2)
    assert not differing + more, f"{len(differing + more)} of {ANSWERS} answers differ"
    # The parser knows the format.
    assert found > ANSWERS / 4
