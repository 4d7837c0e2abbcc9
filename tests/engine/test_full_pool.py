"""What plain decoding answers in a pool of 256 tokens, our worker answers: near the pool's end its
steps take what is left. And an answer ends at the end of the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_dflash.bench.server import Server
from tests.engine import servers as s
from tests.engine.full_pool import fills_context, fills_pool, fills_pool_often
from tests.engine.servers import Ask, ServerConfig


def cases() -> Iterator[Any]:
    for config in (*s.FULL.values(), s.FULL_NO_OVERLAP):
        plain = s.FULL_PLAIN[int(str(config.flags["--page-size"]))]
        for ask in (fills_pool, fills_pool_often):
            marks = [pytest.mark.recorded(plain, ask)]
            marks += [pytest.mark.long] * (config != s.FULL[1, 8] or ask is fills_pool_often)
            values = config, plain, ask
            yield pytest.param(*values, marks=marks, id=f"{config}-{ask.__name__}")
    for config in s.SHORT_CONTEXT:
        values = config, s.SHORT_PLAIN, fills_context
        marks = [pytest.mark.recorded(s.SHORT_PLAIN, fills_context), pytest.mark.long]
        yield pytest.param(*values, marks=marks, id=str(config))


@pytest.mark.parametrize(("config", "plain", "ask"), cases())
def test_what_plain_decoding_answers_is_answered(
    config: ServerConfig, plain: ServerConfig, ask: Ask, answers: Any, server: Server
) -> None:
    ours, theirs = answers(config, ask), answers(plain, ask)
    answered = [i for i, answer in enumerate(theirs) if "output_ids" in answer]
    assert len(answered) > 0.8 * len(theirs)
    differing = [
        (i, ours[i].get("status"))
        for i in answered
        if ours[i].get("output_ids") != theirs[i]["output_ids"]
    ]
    assert not differing
    # No two requests take each other's place again and again.
    assert max(ours[i]["meta_info"]["num_retractions"] for i in answered) <= 4
    assert server.dflash()["verify_steps"] > 50
