"""`python -m experiments lookup --recorded`: lookup on given texts, by hand and against the
server's."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import recorded
from experiments.lookup import Options, recorded_positions, replay_recorded, table, tokens_per_step
from experiments.recorded import RecordedText
from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.text_match import LONGEST_MATCH, find_match


def test_steps_by_hand() -> None:
    # 1 2 3 4 stood before; after the prefill's token 1, lookup from one token finds 2 3 4, and 9
    # is the target's own.
    text = RecordedText(np.array([1, 2, 3, 4, 7, 8, 1, 2, 3, 4, 9]), 6)
    assert text.match(7) == (1, 1) and text.accepted(7, 7) == 3
    assert text.steps(8, shortest=1) == (1, 0)
    # From two: 2 is decoded, then 3 4 are found.
    assert text.steps(8, shortest=2) == (2, 1)
    assert text.steps(2, shortest=1) == (2, 0)
    assert text.steps(8, shortest=5) == (4, 4)
    # Its end repeats with a period of one.
    assert RecordedText(np.array([5, 6, 6, 6, 6, 6]), 2).accepted(3, 7) == 3


def test_positions_of_a_recorded_answer() -> None:
    text = RecordedText(np.array([1, 2, 3, 4, 7, 8, 1, 2, 3, 4, 9]), 6)
    positions = recorded_positions(text, 1.0)
    assert [at.match for at in positions] == [0, 2, 3, 4]
    assert positions[1].looked_up[:7] == [3, 4, 7, 8, 1, 2, 3] and positions[1].continuation == [
        3,
        4,
        9,
    ]
    # Every draft is right: the answer's tokens after the prefill's take one step.
    assert tokens_per_step(positions, lambda at: at.drafts) == 4
    # No draft is right: a step each, but where lookup is taken.
    wrong = recorded_positions(text, 0.0)
    assert tokens_per_step(wrong, lambda at: at.drafts) == 1
    assert tokens_per_step(wrong, lambda at: at.looked_up if at.match >= 2 else []) == 4 / 2


def test_matches_are_those_of_the_server() -> None:
    rng = random.Random(0)
    ids = [rng.randrange(4) for _ in range(300)]
    text, found = RecordedText(np.array(ids), 100), 0
    table_ = torch.tensor([ids], dtype=torch.int32)
    for at in range(100, 299):
        row, length = torch.tensor([0]), torch.tensor([at - 1])
        requests = RequestSlots(table_, row, length, at - 1)
        match, seen = find_match(torch.tensor([ids[at - 1]]), table_.clone(), requests, 7)
        length_, source = text.match(at)
        # The server does not take a match of one.
        if length_ >= 2:
            assert int(match) == length_ <= LONGEST_MATCH
            period = at - source
            assert seen[0].tolist() == [ids[source + i % period] for i in range(7)]
            found += 1
    assert found > 150


def test_a_file_of_recorded_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer once, long contexts left out, and no text in the result."""
    case = {"messages": [{"role": "user", "content": "copy x y z"}]}
    answers = ["x y z secret", "x y z secret", "other words here"]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"cases": [case | {"reference_response": a} for a in answers]}))
    assert [found["answer"] for found in recorded.read(file)] == [answers[0], answers[2]]

    class Words:
        def __init__(self) -> None:
            self.known: dict[str, int] = {}

        def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
            return messages[0]["content"] + " :"

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [self.known.setdefault(w, len(self.known)) for w in text.split()]}

    words = Words()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: words)
    monkeypatch.setattr(recorded.public_target, "fetched_folder", lambda: tmp_path)
    result = replay_recorded(file)
    assert result["cases"] == 2 and result["answer_tokens"] == 3 + 2
    # x, then y z at once and the last word; the other answer copies nothing.
    assert result["rows"]["from 1"]["block 8"] == round(5 / (1 + 2), 3)
    assert result["rows"]["from 3"]["block 8"] == 1.0
    assert "secret" not in json.dumps(result)
    assert "from 1" in "\n".join(table(result)) and Options().recorded == ""
    monkeypatch.setattr(recorded, "MOST_TOKENS", 8)
    assert replay_recorded(file)["cases"] == 1


@pytest.mark.parametrize("content", ["", "[]", '{"cases": [{"messages": []}]}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "cases.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"recorded.*\"cases\""):
        recorded.read(file)
