"""Texts of the experiments."""

from __future__ import annotations

from experiments import texts
from tests.held_out import held_out_files


def test_long_documents_are_of_files_that_neither_model_has_seen() -> None:
    held_out = "".join(held_out_files().values())
    found = texts.load("unseen-long", 1000, "code")
    assert len(found) >= 16 and found == texts.load("unseen-long", 1000, "code")
    least, most = texts.LONG_BYTES
    for prompt in found:
        assert least - 200 <= len(prompt.turns[0]) <= most and not prompt.chat
        # All lines are theirs: a document is of one file or of several.
        assert all(line in held_out for line in prompt.turns[0].splitlines(keepends=True))


def test_agents_share_prefixes() -> None:
    found = texts.load("agents", 1000, "dense")
    assert len(found) == len(set(found)) == 16 and not any(prompt.chat for prompt in found)
    header = found[0].turns[0].partition("\n# result")[0]
    assert all(prompt.turns[0].startswith(header) for prompt in found)
    for one, other in zip(found[::2], found[1::2], strict=True):
        same = [a == b for a, b in zip(one.turns, other.turns, strict=True)]
        assert same[:2] == [True, True] and not any(same[2:])
    assert found[:3] == texts.load("agents", 3, "dense")


def test_easy_and_hard_texts_take_turns() -> None:
    demo = set(texts.load("demo", 1000, "dense"))
    found = texts.load("alternating", 16, "dense")
    assert [prompt in demo for prompt in found] == ([True] * 4 + [False] * 4) * 2
    assert len(set(texts.load("random", 1000, "dense"))) == 64
