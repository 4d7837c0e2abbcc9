"""The comparison of answers in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import client
from tests.engine.comparison import PARTS
from tests.engine.near_ties import assert_same_but_for_near_ties, beside_likeliest


def answer(*ids: int, gaps: tuple[float, ...] = ()) -> dict[str, Any]:
    scores = [[[-0.5, 1, None], [-0.5 - gap, 2, None]] for gap in gaps]
    return {"output_ids": list(ids), "meta_info": {"output_top_logprobs": scores}}


PLAIN = [answer(1, 2, 3, gaps=(2.0, 0.125, 2.0)), answer(4, 5), answer(6, 7)]


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ((1, 2, 3), None),
        ((1, 9, 9), None),
        ((9, 2, 3), "at token 0, gap 2.0"),
        ((1, 2), "at token 2, gap 2.0"),
        ((1, 2, 3, 4), "at token 3, gap None"),
    ],
)
def test_only_near_ties_may_differ(ours: tuple[int, ...], told: str | None) -> None:
    answers = [answer(*ours), *PLAIN[1:]]
    if told is None:
        assert_same_but_for_near_ties(answers, PLAIN)
    else:
        with pytest.raises(AssertionError, match=told):
            assert_same_but_for_near_ties(answers, PLAIN)


def test_an_answer_without_log_probabilities_may_not_differ() -> None:
    with pytest.raises(AssertionError, match="1 of 3 answers differ"):
        assert_same_but_for_near_ties([PLAIN[0], answer(4, 9), PLAIN[2]], PLAIN)


def test_many_near_ties_are_no_agreement() -> None:
    plain = [answer(1, gaps=(0.0,))] * 2
    with pytest.raises(AssertionError, match="near-ties in 2 of 2"):
        assert_same_but_for_near_ties([answer(2)] * 2, plain)


def test_the_plain_server_is_asked_for_the_likeliest_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "ask", lambda server, text, more=None, **sampling: more)
    ask = beside_likeliest(lambda server: client.ask(server, "text", {"stream": False}))
    plainly, _ = PARTS.pop(ask)
    assert ask(None) == {"stream": False}  # type: ignore[arg-type]
    scored = plainly(None)  # type: ignore[arg-type]
    assert scored == {"stream": False, "return_logprob": True, "top_logprobs_num": 2}
