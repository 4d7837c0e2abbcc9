"""Properties of the answers to request features, beyond equality with plain decoding's
(test_exactness.py): a grammar is followed, a session continues from its cache, an abort ends a
request.

The requests are in feature_requests.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import requests

from sglang_dflash.tools.bench.server import Server
from tests.engine import feature_requests as features
from tests.engine.feature_requests import Answers
from tests.engine.servers import (
    FEATURES_DFLASH,
    FEATURES_DFLASH_NO_OVERLAP,
    FEATURES_PLAIN,
    ServerConfig,
)
from tests.engine.workload import assert_same_outputs

either = pytest.mark.parametrize("config", [FEATURES_DFLASH, FEATURES_DFLASH_NO_OVERLAP], ids=str)
overlapped = pytest.mark.server(FEATURES_DFLASH)
not_overlapped = pytest.mark.server(FEATURES_DFLASH_NO_OVERLAP)


def compared(*asks: Callable[[Server], Answers]) -> pytest.MarkDecorator:
    return pytest.mark.recorded(FEATURES_PLAIN, *asks)


def drafts_accepted(answers: Answers) -> list[bool]:
    return [a["meta_info"].get("spec_num_correct_drafts", 0) > 2 for a in answers]


@overlapped
def test_outputs_under_a_grammar_follow_it(answers: Any) -> None:
    constrained = answers(FEATURES_DFLASH, features.grammars)
    texts = [a["text"] for a in constrained]
    for text in texts[:2]:
        jsonschema.validate(json.loads(text), features.POINT)
    for i, regular in enumerate(features.REGULAR):
        assert all(re.fullmatch(regular, text) for text in texts[2 + 2 * i : 4 + 2 * i])
    term = r"([a-z]{1,4}|[0-9]{1,3}|\([^\[\]]*\))"
    total = rf"{term}( \+ {term}){{0,2}}"
    assert all(re.fullmatch(rf"\[{total}(, {total}){{1,3}}\]", text) for text in texts[8:10])
    # Beside a processor.
    assert all(re.fullmatch(features.REGULAR[1], text) for text in texts[12:14])
    # The grammar that the target would follow anyway costs no drafts.
    assert all(drafts_accepted(constrained[2:4]))


@overlapped
@compared(features.logprobs)
@pytest.mark.parametrize(
    "key", [f"{of}_{what}" for of in ("input", "output") for what in ("token", "top", "token_ids")]
)
def test_logprobs_are_plain_decodings(key: str, answers: Any) -> None:
    pairs = zip(
        answers(FEATURES_DFLASH, features.logprobs),
        answers(FEATURES_PLAIN, features.logprobs),
        strict=True,
    )
    for ours, plain in pairs:
        got, expected = (flat(answer["meta_info"][f"{key}_logprobs"]) for answer in (ours, plain))
        assert [token for _, token in got] == [token for _, token in expected]
        assert [p for p, _ in got] == pytest.approx([p for p, _ in expected], abs=1e-4)
        counted = "completion_tokens" if key.startswith("output") else "prompt_tokens"
        tokens = ours["meta_info"][counted]
        each = {"token": 1, "top": 4, "token_ids": 2}[key.split("_", 1)[1]]
        assert tokens - 1 <= len(got) / each <= tokens


def flat(entries: Any) -> list[tuple[float, int]]:
    """(log-probability, token) of all entries, position by position; SGLang leaves the prompt's
    first one open."""
    if entries is None or (entries[0] is None and isinstance(entries[1], int)):
        return []
    if isinstance(entries[0], float):
        return [(entries[0], entries[1])]
    return [one for entry in entries for one in flat(entry)]


@overlapped
@pytest.mark.parametrize(
    "feature", [features.biases, features.processors], ids=lambda f: f.__name__
)
def test_a_bias_changes_the_output(feature: Callable[[Server], Answers], answers: Any) -> None:
    ids = [a["output_ids"] for a in answers(FEATURES_DFLASH, feature)]
    changed = [[ids[i] != ids[i + way] for i in range(0, len(ids), 3)] for way in (1, 2)]
    assert all(map(any, changed))


@not_overlapped
@compared(features.processors_of_history)
def test_a_processor_sees_the_whole_output_before(answers: Any) -> None:
    """Overlap is off: with it, SGLang's own processors may see all but the last token."""
    ours, plain = (
        answers(config, features.processors_of_history)
        for config in (FEATURES_DFLASH_NO_OVERLAP, FEATURES_PLAIN)
    )
    assert_same_outputs(ours, plain)
    assert all(len(set(a["output_ids"])) == len(a["output_ids"]) for a in ours)


@overlapped
def test_no_stop_before_min_new_tokens(answers: Any) -> None:
    held, free = answers(FEATURES_DFLASH, features.earliest_stops)
    stop = free["output_ids"][-1]
    assert len(free["output_ids"]) <= 5
    assert stop not in held["output_ids"][:19] and len(held["output_ids"]) >= 20


@overlapped
def test_an_urgent_request_overtakes(answers: Any) -> None:
    urgent, *ordinary = [a["ended"] for a in answers(FEATURES_DFLASH, features.priorities)]
    # At least the four that waited when it came.
    assert sum(ended > urgent for ended in ordinary) >= 4


@overlapped
@compared(features.aborts)
def test_aborted_requests_end_and_the_others_continue(answers: Any) -> None:
    """They hold nothing afterwards: the cache was flushed in between."""
    ours, plain = (answers(config, features.aborts) for config in (FEATURES_DFLASH, FEATURES_PLAIN))
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        x, y = a["output_ids"], b["output_ids"]
        assert x[: len(y)] == y[: len(x)]
        if i in (1, 2):
            assert a["meta_info"]["finish_reason"]["type"] == "abort" and len(x) < 20_000
        else:
            assert len(x) == len(y) == a["meta_info"]["finish_reason"]["length"]


@overlapped
def test_beam_search_is_refused(server: Server) -> None:
    """It is refused as docs/limits.md says, not served by chance: other requests go on."""
    body = {"text": "import os", "sampling_params": {"beam_width": 2, "max_new_tokens": 4}}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400 and "Beam search" in answer.text
    assert server.generate("import os", max_new_tokens=4)["output_ids"]


@either
def test_sessions_continue_from_what_is_cached(config: ServerConfig, answers: Any) -> None:
    """A turn's prompt is the whole conversation, cached but for its last token if no forward has
    computed that. If a step that also prefills ends a turn, SGLang counts one token less."""
    turns = answers(config, features.sessions)
    for session in (turns[:3], turns[4:7], turns[7:10]):
        for before, turn in itertools.pairwise(session):
            info = before["meta_info"]
            length = info["prompt_tokens"] + info["completion_tokens"]
            assert length - turn["meta_info"]["cached_tokens"] in (0, 1, 2)
            assert turn["meta_info"]["prompt_tokens"] > length


@either
def test_prompts_were_prefilled_among_decoding_requests(config: ServerConfig, answers: Any) -> None:
    """Mixed steps commit tokens too: those beyond a request's first that no verify step gave. The
    surplus of a last step hides some."""
    infos = [a["meta_info"] for a in answers(config, features.mixed_chunks)[:6]]
    committed = sum(i["completion_tokens"] - 1 for i in infos)
    verified = ("spec_verify_ct", "spec_num_correct_drafts")
    assert committed - sum(i.get(count, 0) for i in infos for count in verified) > 40


@overlapped
def test_adapters_change_the_output(answers: Any) -> None:
    got = answers(FEATURES_DFLASH, features.adapters)
    pairs = zip(got[::2], got[1::2], strict=True)
    assert all(a["output_ids"] != b["output_ids"] for a, b in pairs)
    assert [a["output_ids"] for a in got[6:]] == [a["output_ids"] for a in got[:2]]
    assert all(a["meta_info"]["cached_tokens"] > 50 for a in got[6:])
    # Drafts are made for the target without an adapter.
    assert all(drafts_accepted(got[1::2]))
