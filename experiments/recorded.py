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
from sglang_dflash.drafting.text_match import LONGEST_MATCH
from sglang_dflash.tools.demo_pairs import public_target

BLOCKS, LEAST = (8, 16, 32), (3, 2, 1)
MOST_TOKENS = 100_000


@dataclass
class RecordedText:
    """A context with its answer, and the matches of lookup in the answer.

    Attributes:
        ids: int64 `[N]`, the tokens of both.
        begin: index of the answer's first token.
    """

    ids: Any
    begin: int
    _matches: dict[int, tuple[int, int]] = field(default_factory=dict)

    def match(self, at: int) -> tuple[int, int]:
        """Return the length of the longest match of the tokens before position `at` with earlier
        text, up to `LONGEST_MATCH`, and the position after the match; the latest of equal ones."""
        if at not in self._matches:
            places, length, best = np.flatnonzero(self.ids[: at - 1] == self.ids[at - 1]), 0, 0
            while len(places) and length < LONGEST_MATCH:
                length, best = length + 1, int(places[-1]) + 1
                places = places[places >= length]
                places = places[self.ids[places - length] == self.ids[at - 1 - length]]
            self._matches[at] = length, best
        return self._matches[at]

    def accepted(self, at: int, proposed: int) -> int:
        """Count the right tokens of `proposed` ones from `at` on, which repeat those after the
        match. A match that overlaps the end of the text repeats with its period."""
        _, source = self.match(at)
        period, count = at - source, 0
        while count < min(proposed, len(self.ids) - at):
            if self.ids[at + count] != self.ids[source + count % period]:
                break
            count += 1
        return count

    def followers(self, at: int, count: int) -> list[int]:
        """Return the `count` tokens that lookup proposes at position `at`, which has a match."""
        _, source = self.match(at)
        return [int(self.ids[source + k % (at - source)]) for k in range(count)]

    def steps(self, block: int, shortest: int) -> tuple[int, int]:
        """Return the number of steps of the answer, and of steps without an accepted token."""
        at, steps, nothing = self.begin + 1, 0, 0
        while at < len(self.ids):
            is_lookup = self.match(at)[0] >= shortest
            right = self.accepted(at, block - 1) if is_lookup else 0
            at, steps, nothing = at + right + 1, steps + 1, nothing + (right == 0)
        return steps, nothing


def read(file: Path) -> list[dict[str, Any]]:
    """Read the cases of a file in the layout of lucebench's `agent_recorded`, each answer once.

    Raises:
        ConfigError: the file has another layout, or cannot be read.
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


def texts_of(cases: Sequence[dict[str, Any]]) -> list[RecordedText]:
    """Tokenize cases for the public target. Those of more than `MOST_TOKENS` are left out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(public_target.fetched_folder())
    texts = []
    for case in cases:
        context = tokenizer.apply_chat_template(
            case["messages"], add_generation_prompt=True, tokenize=False
        )
        before = tokenizer(context, add_special_tokens=False)["input_ids"]
        answer = tokenizer(case["answer"], add_special_tokens=False)["input_ids"]
        if len(answer) > 1 and len(before) + len(answer) <= MOST_TOKENS:
            texts.append(RecordedText(np.array(before + answer), len(before)))
    return texts


def run(cases: Sequence[RecordedText]) -> dict[str, Any]:
    """Return the tokens per step of lookup alone."""
    # The first token of an answer is the prefill's.
    tokens = sum(len(text.ids) - text.begin - 1 for text in cases)
    rows: dict[str, dict[str, float]] = defaultdict(dict)
    for shortest in LEAST:
        for block in BLOCKS:
            steps, nothing = map(
                sum, zip(*(text.steps(block, shortest) for text in cases), strict=True)
            )
            rows[f"from {shortest}"][f"block {block}"] = round(tokens / steps, 3)
            rows[f"from {shortest}"][f"nothing accepted, {block}"] = round(nothing / steps, 3)
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
            f"{rule:18}" + "".join(f"{row[name]:10.2f}" for name in names)
            for rule, row in result["rows"].items()
        ),
        "block 8, beside a draft each of whose tokens is right with a chance of",
        *(
            f"{chance:18}" + "".join(f"{rule:>14} {value:.2f}" for rule, value in row.items())
            for chance, row in result["beside_a_draft"].items()
        ),
    ]
