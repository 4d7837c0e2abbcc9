"""An answer whose block holds several reasons to end ends as plain decoding's does."""

from __future__ import annotations

import itertools
import random
import re
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_dflash.serving.step.scheduler import (
    cut_last_turn,
    end_at_the_first_reason,
    without_rows_after_the_end,
)
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.patches.originals import original
from tests.serving.batches import request_of

UPDATE = original("sglang.srt.managers.schedule_batch.Req.update_finish_state")
VOCAB = 1024
TOKENIZER = get_tokenizer(str(demo_pair("dense").target))
BEFORE = TOKENIZER.encode("import os")
TEXT = TOKENIZER.encode("def first(a, b): return [word for line in text]\n\nclass Box:")
BLOCK = list(dict.fromkeys(TEXT))[:12]


class Ended:
    """A grammar that has read a block, and ended with its last token."""

    def is_terminated(self) -> bool:
        return True


def kinds(token: int, at: int) -> dict[str, dict[str, Any]]:
    """A condition of every kind that ends an answer with that token of a block."""
    text = re.escape(TOKENIZER.decode([token]))
    return {
        "string": {"stop": [TOKENIZER.decode([token])]},
        "regex": {"stop_regex": [f"(?:{text})"]},
        "anchored": {"stop_regex": [f"{text}$"]},
        "token": {"stop_token_ids": [token]},
        "eos": {"eos": {token}},
        "length": {"max_new_tokens": len(BEFORE) + at + 1},
        "vocabulary": {"outside": at},
        "grammar": {"ended": at},
    }


def together(*conditions: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for condition in conditions:
        for name, value in condition.items():
            both = isinstance(value, list) and name in found
            found[name] = found[name] + value if both else value
    return found


def request_with(
    eos: set[int] | None = None, outside: int = 0, ended: int = 0, **given: Any
) -> Req:
    params = SamplingParams(**{"max_new_tokens": 1000, **given})
    params.normalize(TOKENIZER)
    request = Req("r", "", array("q", [1, 2]), params, eos_token_ids=eos, vocab_size=VOCAB)
    request.tokenizer = TOKENIZER
    return request


def answered(judge: Any, tokens: list[int], steps: list[int], **given: Any) -> tuple[Any, ...]:
    """Return the tokens that a request keeps whose steps commit `steps` tokens each, its reason to
    end, and the number of its reasoning tokens: all count."""
    request, at = request_with(**given), 0
    for step in steps:
        new = tokens[at : at + step]
        at += step
        request.output_ids.extend(new)
        request.reasoning_tokens += step
        if given.get("ended") and at > len(BEFORE) + given["ended"]:
            request.grammar = Ended()
        judge(request, step)
        assert request.grammar is None or request.grammar.is_terminated()
        if request.finished():
            break
    assert (
        list(request.output_ids[len(request.output_ids_through_stop) :])
        == tokens[len(request.output_ids_through_stop) : at]
    )
    reason = request.finished_reason
    kept = list(request.output_ids_through_stop)
    return kept, reason and reason.to_json(), request.reasoning_tokens


def ours(request: Req, count: int) -> None:
    end_at_the_first_reason(UPDATE, request, count)


def block_with(given: dict[str, Any]) -> list[int]:
    block = list(BLOCK)
    if "outside" in given:
        block[given["outside"]] = VOCAB + 7
    # A grammar's end cuts what was accepted.
    return block[: given.get("ended", len(block) - 1) + 1]


KINDS = list(kinds(BLOCK[0], 0))
PAIRS = list(itertools.permutations(KINDS, 2))


def both_ways(pair: tuple[str, str], early: int = 2, late: int = 6) -> tuple[Any, Any, Any]:
    """Plain decoding's end, ours, and that of SGLang for several tokens."""
    given = together(kinds(BLOCK[early], early)[pair[0]], kinds(BLOCK[late], late)[pair[1]])
    block = block_with(given)
    tokens = BEFORE + block
    single, whole = [1] * len(tokens), [len(BEFORE), len(block)]
    return tuple(  # type: ignore[return-value]
        answered(judge, tokens, steps, **given)
        for judge, steps in ((UPDATE, single), (ours, whole), (UPDATE, whole))
    )


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_earlier_of_two_reasons_ends_the_answer(pair: tuple[str, str]) -> None:
    plain, got, _ = both_ways(pair)
    assert plain[1] is not None and len(plain[0]) == len(BEFORE) + 3
    assert got == plain


def test_a_later_reason_wins_without_the_row() -> None:
    later = [pair for pair in PAIRS if len(both_ways(pair)[2][0]) > len(BEFORE) + 3]
    assert {("token", "string"), ("string", "vocabulary"), ("token", "regex")} <= set(later)
    # Strings are tried in the order of the list.
    for order in itertools.permutations((1, 5, 8)):
        stop = [TOKENIZER.decode([BLOCK[at]]) for at in order]
        whole = [len(BEFORE), len(BLOCK)]
        plain = answered(UPDATE, BEFORE + BLOCK, [1] * sum(whole), stop=stop)
        assert answered(ours, BEFORE + BLOCK, whole, stop=stop) == plain
        theirs = answered(UPDATE, BEFORE + BLOCK, whole, stop=stop)
        assert (theirs[:2] == plain[:2]) == (order[0] == 1)


def drawn(rng: random.Random, tokens: list[int]) -> dict[str, Any]:
    """Conditions from the answer itself, some of which it does not meet."""

    def piece() -> str:
        start = rng.randrange(len(tokens))
        text = TOKENIZER.decode(tokens[start : start + rng.randint(1, 3)])
        first = rng.randrange(len(text)) if text else 0
        return text[first : first + rng.randint(1, 4)] or "?"

    given: dict[str, Any] = {"no_stop_trim": rng.random() < 0.5}
    if rng.random() < 0.7:
        given["stop"] = [piece() for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.6:
        ends = rng.choice(("", "$", r"\b", "(?!e)", ".?"))
        given["stop_regex"] = [re.escape(piece()) + ends for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.5:
        given["stop_token_ids"] = rng.sample(tokens, 2)
    if rng.random() < 0.4:
        given["eos"] = {rng.choice(tokens)}
    if rng.random() < 0.4:
        given["max_new_tokens"] = rng.randint(1, len(tokens))
    given["ignore_eos"] = rng.random() < 0.2
    return given


def test_answers_end_as_under_plain_decoding() -> None:
    """Random tokens, so that texts have broken characters; random conditions and steps."""
    rng, ended, differ = random.Random(0), 0, 0
    for _ in range(400):
        tokens = [rng.randrange(VOCAB) for _ in range(40)]
        if rng.random() < 0.2:
            tokens[rng.randrange(40)] = VOCAB + 3
        given, steps = drawn(rng, [t for t in tokens if t < VOCAB]), []
        while sum(steps) < len(tokens):
            steps.append(min(rng.randint(1, 8), len(tokens) - sum(steps)))
        plain = answered(UPDATE, tokens, [1] * len(tokens), **given)
        assert answered(ours, tokens, steps, **given) == plain, given
        ended += plain[1] is not None
        differ += answered(UPDATE, tokens, steps, **given)[:2] != plain[:2]
    assert ended > 300 and differ > 20


@pytest.mark.parametrize(
    ("given", "at_once"),
    [
        ({}, True),
        ({"stop": ["?!"]}, True),
        ({"stop": ["?!", "\ufffd"]}, False),
        ({"stop_regex": ["[?]!"]}, False),
    ],
    ids=str,
)
def test_a_request_that_goes_on_is_judged_once(given: dict[str, Any], at_once: bool) -> None:
    """But for texts that may match before the last token only."""
    counts: list[int] = []

    def judge(request: Req, count: int) -> None:
        counts.append(count)
        UPDATE(request, count)

    request = request_with(**given)
    request.output_ids.extend(BEFORE + BLOCK[:4])
    end_at_the_first_reason(judge, request, 4)
    assert not request.finished() and list(request.output_ids) == BEFORE + BLOCK[:4]
    assert counts == ([4] if at_once else [1, 1, 1, 1])


@pytest.mark.parametrize(
    ("stop", "text", "drops_spaces"), [("\ufffd", "a\u4e2d", False), ("do n", "do n't", True)]
)
def test_a_text_that_goes_on_has_matched(
    stop: str, text: str, drops_spaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of a character, or before what drops a space."""
    tokens, decode = TOKENIZER.encode(text), TOKENIZER.decode
    monkeypatch.setattr(TOKENIZER, "decode", lambda ids: decode(ids).replace(" n't", "n't"))
    monkeypatch.setattr(TOKENIZER, "clean_up_tokenization_spaces", drops_spaces)
    assert stop not in TOKENIZER.decode(tokens)
    plain = answered(UPDATE, tokens, [1] * len(tokens), stop=[stop])
    assert plain[1] is not None
    assert answered(ours, tokens, [len(tokens)], stop=[stop]) == plain


def test_an_abort_ends_a_step_at_once() -> None:
    request = request_with()
    request.output_ids.extend(BEFORE + BLOCK)
    request.to_finish = FINISH_ABORT("away")
    ours(request, len(BLOCK))
    assert request.finished_reason.to_json()["message"] == "away"
    assert list(request.output_ids) == BEFORE + BLOCK
    # And nothing is judged twice.
    end_at_the_first_reason(lambda given, count: given, request, 3)


def test_the_next_turn_reads_on_after_the_end_without_the_row() -> None:
    """The step which ended the last turn with its fourth token has committed two more."""
    turn, asked = SimpleNamespace(input_ids=array("q", [8, 9])), SessionParams()
    join = original("sglang.srt.session.session_controller.Session._concat_token_arrays")
    for ended, kept in ((4, [1, 2, 3, 4]), (None, [1, 2, 3, 4, 5, 6])):
        last = request_of(prompt=[7], output=[1, 2, 3, 4, 5, 6], finished_len=ended)
        theirs = list(join(last, turn, asked)[0])
        cut_last_turn(last, turn, asked)
        assert [list(ids) for ids in join(last, turn, asked)] == [[7, *kept, 8, 9]] * 2
        assert (theirs == [7, *kept, 8, 9]) == (ended is None)


@pytest.mark.parametrize("mode", [True, "last"])
def test_a_row_of_hidden_states_per_token_kept(mode: Any) -> None:
    """After a step of 6 tokens a request of 10 has ended with its eighth. Without the row SGLang
    returns those of the two tokens after it, too."""
    name = "sglang.srt.managers.scheduler_components.batch_result_processor"
    append = original(f"{name}.SchedulerBatchResultProcessor._append_decode_hidden_states")
    rows = torch.arange(16.0).view(16, 1)
    for ended, kept in ((8, [3, 4, 5, 6]), (None, [3, 4, 5, 6, 7, 8])):
        request = request_of(output=10, finished_len=ended, return_hidden_states=mode)
        step = {"hidden_states": rows, "start": 3, "accept_len": 6}
        without_rows_after_the_end(append, req=request, **step)
        expected = kept if mode is True else kept[-1:]
        assert request.hidden_states == [[float(row)] for row in expected]
        request.hidden_states = []
        append(req=request, **step)
        assert (len(request.hidden_states) > len(kept)) == (mode is True and ended is not None)


@pytest.mark.parametrize("fails_at", range(1, 6))
def test_a_request_is_whole_after_a_failure_between_its_tokens(fails_at: int) -> None:
    """After a contained failure the request has its grammar, and every token of the step."""
    request, calls = request_with(stop_regex=["[?]"]), itertools.count(1)
    request.grammar = Ended()
    request.output_ids.extend(BEFORE + BLOCK[:5])
    grammar, looked_at = request.grammar, []

    def failing(request: Req, count: int) -> None:
        looked_at.append(request.output_ids[-1])
        if next(calls) == fails_at:
            raise KeyError("a stop string")

    with pytest.raises(KeyError):
        end_at_the_first_reason(failing, request, 5)
    assert looked_at == BLOCK[:fails_at]
    assert list(request.output_ids) == BEFORE + BLOCK[:5]
    assert request.grammar is grammar
