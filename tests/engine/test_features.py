"""What a request can ask for, with and without speculation: equal answers, in float32, with everything it needs switched on at once.

The plain server runs without overlap scheduling: with it, SGLang counts output tokens for penalties and custom processors a step
late, depending on what else is being prefilled.

What is asked is in feature_requests. What is tested elsewhere, on a server of its own: stop strings and stop tokens inside a block, a
bias of +-100, `n` choices and clients that hang up (test_4_requests), seeds, temperatures and `n` samples (test_3_sampling), penalties
under overlap, one request at a time (test_1_exact).
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jsonschema
import pytest
import requests

from tests.engine import feature_requests as asked
from tests.engine.conftest import Running
from tests.engine.feature_requests import ASKED, WITH, WITHOUT, Answers
from tests.engine.workload import assert_same_outputs

PLAIN = "features-plain"
either = pytest.mark.parametrize("name", [WITH, WITHOUT])


class Said:
    """What configurations say to a feature's requests. Each server is asked for all in one go; what fails, fails its own tests."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._known: dict[tuple[str, Any], Answers | Exception] = {}

    def __call__(self, name: str, feature: Any) -> Answers:
        if (name, feature) not in self._known:
            server = self._running.get(name)
            for each in ASKED[name]:
                try:
                    self._known[name, each] = each(server)
                except (requests.RequestException, AssertionError) as error:
                    self._known[name, each] = error
        said = self._known[name, feature]
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture(scope="module")
def said(running: Running) -> Said:
    asked.write_adapter()
    return Said(running)


def drafts_accepted(answers: Answers) -> list[bool]:
    return [a["meta_info"].get("spec_num_correct_drafts", 0) > 2 for a in answers]


# Whose answers are compared token by token here; of the others, more is asked below.
SAME = (
    asked.grammars, asked.choices, asked.logprobs, asked.biases, asked.penalties, asked.earliest_stops, asked.stops, asked.processors,
    asked.priorities, asked.sessions, asked.mixed_chunks, asked.adapters,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "feature"),
    [(name, feature) for name in (WITH, WITHOUT) for feature in ASKED[name] if feature in SAME],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_answers_are_plain_decodings(said: Said, name: str, feature: Any) -> None:
    ours, plain = said(name, feature), said(PLAIN, feature)
    assert_same_outputs({"all": ours}, {"all": plain})
    # A drafter that is never right would pass the comparison, too.
    assert any(drafts_accepted(ours))


def test_the_worker_is_ours(said: Said) -> None:
    [report] = said(WITH, asked.worker)
    assert (
        report["worker"] == "sglang_dflash.serving.worker.DFlashWorker"
        and report["acceptance_length"] > 1.3
    )


@either
def test_outputs_under_a_grammar_follow_it(said: Said, name: str) -> None:
    texts = [a["text"] for a in said(name, asked.grammars)]
    for text in texts[:2]:
        jsonschema.validate(json.loads(text), asked.POINT)
    for i, regular in enumerate(asked.REGULAR):
        assert all(re.fullmatch(regular, text) for text in texts[2 + 2 * i : 4 + 2 * i])
    term = r"([a-z]{1,4}|[0-9]{1,3}|\([^\[\]]*\))"
    total = rf"{term}( \+ {term}){{0,2}}"
    assert all(re.fullmatch(rf"\[{total}(, {total}){{1,3}}\]", text) for text in texts[8:10])
    # The grammar that the target would follow anyway costs no drafts.
    assert all(drafts_accepted(said(name, asked.grammars)[2:4]))


@pytest.mark.parametrize(
    "key",
    [
        "input_token",
        "input_top",
        "input_token_ids",
        "output_token",
        "output_top",
        "output_token_ids",
    ],
)
def test_logprobs_are_plain_decodings(said: Said, key: str) -> None:
    for ours, plain in zip(said(WITH, asked.logprobs), said(PLAIN, asked.logprobs), strict=True):
        got, expected = (flat(answer["meta_info"][f"{key}_logprobs"]) for answer in (ours, plain))
        assert [token for _, token in got] == [token for _, token in expected]
        assert [p for p, _ in got] == pytest.approx([p for p, _ in expected], abs=1e-4)
        wanted = ours["meta_info"][
            "completion_tokens" if key.startswith("output") else "prompt_tokens"
        ]
        each = {"token": 1, "top": 4, "token_ids": 2}[key.split("_", 1)[1]]
        assert wanted - 1 <= len(got) / each <= wanted


def flat(entries: Any) -> list[tuple[float, int]]:
    """(log-probability, token) of all entries, one position after another; SGLang leaves the prompt's first one open."""
    if entries is None or (entries[0] is None and isinstance(entries[1], int)):
        return []
    if isinstance(entries[0], float):
        return [(entries[0], entries[1])]
    return [one for entry in entries for one in flat(entry)]


@pytest.mark.parametrize("feature", [asked.biases, asked.processors], ids=lambda f: f.__name__)
def test_a_bias_changes_what_is_said(said: Said, feature: Any) -> None:
    ids = [a["output_ids"] for a in said(WITH, feature)]
    changed = [[ids[i] != ids[i + way] for i in range(0, len(ids), 3)] for way in (1, 2)]
    assert all(map(any, changed))


def test_a_processor_sees_the_whole_output_before(said: Said) -> None:
    """Without overlap; with it, SGLang's own processors may see all but the last token."""
    ours, plain = (
        said(WITHOUT, asked.processors_of_history),
        said(PLAIN, asked.processors_of_history),
    )
    assert_same_outputs({"all": ours}, {"all": plain})
    assert all(len(set(a["output_ids"])) == len(a["output_ids"]) for a in ours)


def test_no_stop_before_min_new_tokens(said: Said) -> None:
    held, free = said(WITH, asked.earliest_stops)
    stop = free["output_ids"][-1]
    assert (
        len(free["output_ids"]) <= 5
        and stop not in held["output_ids"][:19]
        and len(held["output_ids"]) >= 20
    )


def test_an_urgent_request_overtakes(said: Said) -> None:
    urgent, *ordinary = [a["ended"] for a in said(WITH, asked.priorities)]
    # At the least the four that waited when it came.
    assert sum(ended > urgent for ended in ordinary) >= 4


def test_aborted_requests_end_and_the_others_go_on(said: Said) -> None:
    """Nothing is held any more, either: the cache was flushed in between."""
    ours, plain = said(WITH, asked.aborts), said(PLAIN, asked.aborts)
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        x, y = a["output_ids"], b["output_ids"]
        assert x[: len(y)] == y[: len(x)]
        if i in (1, 2):
            assert a["meta_info"]["finish_reason"]["type"] == "abort" and len(x) < 20_000
        else:
            assert len(x) == len(y) == a["meta_info"]["finish_reason"]["length"]


@either
def test_hidden_states_are_refused(said: Said, name: str) -> None:
    """As by SGLang under overlap; without it, SGLang's own worker answers with an empty list."""
    (ours, after), (plain, same) = said(name, asked.hidden_states), said(PLAIN, asked.hidden_states)
    assert plain["status"] == 200 and len(plain["meta_info"]["hidden_states"]) == 32
    assert (
        ours["status"] == 400
        and "does not support return_hidden_states" in ours["error"]["message"]
    )
    assert after["output_ids"] == same["output_ids"]


@either
def test_sessions_continue_from_what_is_cached(said: Said, name: str) -> None:
    """A turn's prompt is all that was said before, and cached but for its last token where no forward has seen that."""
    answers = said(name, asked.sessions)
    for turns in (answers[:3], answers[4:7], answers[7:10]):
        for before, turn in itertools.pairwise(turns):
            said_before = (
                before["meta_info"]["prompt_tokens"] + before["meta_info"]["completion_tokens"]
            )
            assert said_before - turn["meta_info"]["cached_tokens"] in (0, 1)
            assert turn["meta_info"]["prompt_tokens"] > said_before


@either
def test_prompts_were_prefilled_among_decoding_requests(said: Said, name: str) -> None:
    """Tokens that no verify step gave, beyond each request's first: those of mixed steps. A last step's surplus hides some."""
    infos = [a["meta_info"] for a in said(name, asked.mixed_chunks)[:6]]
    mixed = [
        i["completion_tokens"]
        - 1
        - i.get("spec_verify_ct", 0)
        - i.get("spec_num_correct_drafts", 0)
        for i in infos
    ]
    assert sum(mixed) > 10


def test_adapters_change_what_is_said(said: Said) -> None:
    answers = said(WITH, asked.adapters)
    assert all(
        a["output_ids"] != b["output_ids"] for a, b in zip(answers[::2], answers[1::2], strict=True)
    )
    assert [a["output_ids"] for a in answers[6:]] == [a["output_ids"] for a in answers[:2]]
    assert all(a["meta_info"]["cached_tokens"] > 50 for a in answers[6:])
    # Drafts are made for the target without an adapter.
    assert all(drafts_accepted(answers[1::2]))
