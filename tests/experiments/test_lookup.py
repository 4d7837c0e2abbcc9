"""`python -m experiments lookup`: rules and their replay, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.lookup import (
    RULES,
    Position,
    better_draft,
    by_rule,
    count_accepted,
    tasks,
    tokens_per_step,
)

# Blocks of four. The text continues as 1 2 3 4 5 6; what follows a rejection was not seen before.
SEEN_LATE = [
    Position([1, 2, 3, 4, 5, 6], drafts=[1, 2, 9], match=2, looked_up=[1, 2, 3, 4, 5, 6]),
    Position([2, 3, 4, 5, 6], drafts=[2, 3, 4], match=3, looked_up=[8, 8, 8, 8, 8, 8]),
    Position([3, 4, 5, 6], drafts=[3, 9, 9], match=4, looked_up=[3, 4, 5, 6, 7, 7]),
    Position([4, 5, 6], drafts=[9, 9, 9], match=0, looked_up=[0, 0, 0, 0, 0, 0]),
    Position([5, 6], drafts=[5, 6, 7], match=1, looked_up=[5, 9, 9, 9, 9, 9]),
    Position([6], drafts=[9, 9, 9], match=8, looked_up=[6, 7, 8, 9, 9, 9]),
]


def test_agreeing_tokens() -> None:
    cases = {((1, 2, 9), (1, 2, 3)): 2, ((1, 2), (1, 2, 3)): 2, ((9,), (1,)): 0, ((), (1,)): 0}
    assert {case: count_accepted(*map(list, case)) for case in cases} == cases


@pytest.mark.parametrize(
    ("rule", "steps"),
    {
        "draft": 3,  # 1 2 3, 4, 5 6
        "match 2": 2,  # 1 2 3 4, 5 6
        "match 4, or 2 and 1 agrees": 2,
        "match 4": 3,
        "lookup": 6,  # A step at a time: the longer match was wrong.
        "best of both": 2,
    }.items(),
)
def test_steps_of_a_rule(rule: str, steps: int) -> None:
    if rule == "lookup":
        wrong = [at._replace(looked_up=[9] * 6) for at in SEEN_LATE]
        assert tokens_per_step(wrong, RULES[rule]()) == len(SEEN_LATE) / steps
    else:
        assert tokens_per_step(SEEN_LATE, RULES[rule]()) == len(SEEN_LATE) / steps


def test_a_server_learns_which_source_is_better() -> None:
    """At first a match of 3 is taken, or one of 2 that agrees; here matches are never right."""
    wrong = [
        at._replace(match=3, looked_up=[9] * 6, drafts=at.continuation[:3]) for at in SEEN_LATE * 40
    ]
    fixed, learn_source, draft = (
        tokens_per_step(wrong, RULES[rule]()) for rule in ("match 3", "learned", "draft")
    )
    assert fixed == 1 and learn_source > 0.9 * draft


def test_a_better_draft_is_right_with_its_chance() -> None:
    for chance, right in ((0.0, 0), (1.0, 3)):
        (positions,) = better_draft([SEEN_LATE[:4]], chance)
        assert [count_accepted(at.drafts, at.continuation) for at in positions] == [right] * 4
        assert [at._replace(drafts=[]) for at in positions] == [
            at._replace(drafts=[]) for at in SEEN_LATE[:4]
        ]


def test_kinds_of_text_are_chats_and_files(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"turns": ["a"]}\n')
    assert list(tasks("")) == ["chat", "sampled"]
    found = tasks(str(tmp_path))
    assert list(found) == ["chat", "sampled", "own"] and found["own"][0].turns == ("a",)


def test_tokens_per_step_of_all_texts_together() -> None:
    late, short = SEEN_LATE, SEEN_LATE[-1:]
    # 6 tokens in 3 steps, and 1 in 1.
    assert by_rule([late, short])["draft"] == round(7 / 4, 3)
