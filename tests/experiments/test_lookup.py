"""`python -m experiments lookup` and `lookup_servers`: rules and their replay, by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import xgrammar

from experiments.lookup import RULES, Position, accepted, edited, tokens_per_step
from experiments.lookup_servers import Asked, compared, sampling, table
from sglang_dflash.bench import load
from sglang_dflash.bench.load import Answer, Pass, SGLang
from sglang_dflash.drafting.acceptance_length import VerifySteps

# Blocks of four. The text continues as 1 2 3 4 5 6; what follows a rejection was not seen before.
SEEN_LATE = [
    Position([1, 2, 3, 4, 5, 6], drafts=[1, 2, 9], match=2, seen=[1, 2, 3, 4, 5, 6]),
    Position([2, 3, 4, 5, 6], drafts=[2, 3, 4], match=3, seen=[8, 8, 8, 8, 8, 8]),
    Position([3, 4, 5, 6], drafts=[3, 9, 9], match=4, seen=[3, 4, 5, 6, 7, 7]),
    Position([4, 5, 6], drafts=[9, 9, 9], match=0, seen=[0, 0, 0, 0, 0, 0]),
    Position([5, 6], drafts=[5, 6, 7], match=1, seen=[5, 9, 9, 9, 9, 9]),
    Position([6], drafts=[9, 9, 9], match=8, seen=[6, 7, 8, 9, 9, 9]),
]


def test_agreeing_tokens() -> None:
    cases = {((1, 2, 9), (1, 2, 3)): 2, ((1, 2), (1, 2, 3)): 2, ((9,), (1,)): 0, ((), (1,)): 0}
    assert {case: accepted(*map(list, case)) for case in cases} == cases


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
        wrong = [at._replace(seen=[9] * 6) for at in SEEN_LATE]
        assert tokens_per_step(wrong, RULES[rule]) == len(SEEN_LATE) / steps
    else:
        assert tokens_per_step(SEEN_LATE, RULES[rule]) == len(SEEN_LATE) / steps


def test_ten_edits() -> None:
    passage, others = list(range(400)), list(range(1000, 1400))
    found = edited(passage, others, random.Random(1))
    kept = [token for token in found if token < 1000]
    assert kept == sorted(kept) and 370 <= len(kept) <= 390
    assert 10 <= len(found) - len(kept) <= 30


def test_a_given_answer_is_the_only_one_that_its_grammar_allows() -> None:
    """Also where other tokens have the same text, and after other grammars."""
    info = xgrammar.TokenizerInfo(["a", "b", "ab", "</s>"], stop_token_ids=[3])
    compiler, mask = xgrammar.GrammarCompiler(info), xgrammar.allocate_token_bitmask(1, 4)
    for number, answer in enumerate(([2, 0, 1], [0, 1, 0], [1, 2, 2])):
        matcher = xgrammar.GrammarMatcher(
            compiler.compile_grammar(sampling(answer, number)["ebnf"])
        )
        for token in answer:
            matcher.fill_next_token_bitmask(mask)
            assert mask.item() & 0b1111 == 1 << token
            assert matcher.accept_token(token)
    assert sampling(None, 0) == {"temperature": 0, "ignore_eos": True}


def test_a_comparison_needs_equal_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def passed(to: Any, *_: Any) -> Pass:
        answer = Answer("", (1, 2) if to.url == "off" else others, 2, 0.1, 0.2, 1)
        seconds = {"off": 2.0, "on": 1.0}[to.url]
        return Pass(seconds, [[answer]], VerifySteps(1, 2))

    monkeypatch.setattr(load, "run", passed)
    arms, others = {name: SGLang(name) for name in ("off", "on")}, (1, 2)
    found = compared(arms, [Asked([1], {})], level=1, rounds=3)
    assert (found["ratio"], found["on_tokens_per_second"]) == (2.0, 2.0)
    row = {"text": "quote", "concurrency": 1, **found}
    assert table({"rows": [row]})[1].split()[-2:] == ["2.000", "2.000"]
    others = (1, 3)
    with pytest.raises(RuntimeError, match="outputs differ"):
        compared(arms, [Asked([1], {})], level=1, rounds=3)
