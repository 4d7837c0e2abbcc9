"""The comparison of test_tool_streams.py with a parser of reasoning before that of tool calls."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.parser.reasoning_parser import ReasoningParser

from tests.conftest import FUZZ
from tests.plugins.repairs.detokenized import streamed
from tests.plugins.repairs.test_tool_streams import parsed, tokenizer
from tests.plugins.repairs.tool_conversations import conversation, random_text
from tests.plugins.repairs.tool_formats import FORMATS, JSON_TEMPLATE

ANSWERS = 60 * FUZZ
REGISTERED = ReasoningParser.DetectorMap
# Before and after a model's reasoning, where the parser does not tell.
FRAMES = {
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "inkling": ("<|message_model|><|content_thinking|>", "<|end_message|>"),
    "beam": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}


def make(name: str, **settings: Any) -> ReasoningParser:
    template = SimpleNamespace(response_template=JSON_TEMPLATE)
    own = template if name == "response_template" else None
    return ReasoningParser(name, tokenizer=own, tool_call_parser_active=True, **settings)


def answer(name: str, rng: random.Random) -> str:
    """Some begin without a tag, as where the prompt has it; some have none, or text before it."""
    detector = make(name).detector
    begin, end = FRAMES.get(name, (detector.think_start_token, detector.think_end_token))
    tools = conversation(FORMATS.get(name, FORMATS["qwen25"]), rng)
    thought = random_text(rng) + rng.choice(("", "\n"))
    return rng.choice(
        (
            begin + thought + end + tools,
            begin + thought + end + "\n\n" + tools,
            thought + end + tools,
            begin + thought + tools,
            random_text(rng, 1) + begin + thought + end + tools,
            begin + thought + end + begin + thought + end + tools,
            tools,
        )
    )


def taken_apart(name: str, settings: dict[str, Any], texts: list[str]) -> Any:
    """Reasoning, and of the rest text and calls."""
    parser = make(name, **settings)
    parts = [parser.parse_stream_chunk(text) for text in texts]
    parts.append(parser.parse_stream_end())
    rest = [text or "" for _, text in parts]
    tools = name if name in FORMATS else "qwen25"
    return "".join(thought or "" for thought, _ in parts), parsed(tools, rest)


@pytest.mark.parametrize("name", REGISTERED)
def test_blocks_give_the_reasoning_of_single_tokens(name: str) -> None:
    rng, thoughts = random.Random(name), 0
    settings: dict[str, Any] = {"stream_reasoning": rng.random() < 0.7}
    texts = [answer(name, rng) for _ in range(ANSWERS)]
    for alone, blocks in streamed(tokenizer(1), texts, rng):
        expected = taken_apart(name, settings, alone)
        assert taken_apart(name, settings, blocks) == expected
        thoughts += bool(expected[0])
    # This one leaves it in the text.
    assert thoughts > ANSWERS / 4 or name == "minimax-append-think"
