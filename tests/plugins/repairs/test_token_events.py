"""An event of several tokens becomes events of one, whose texts are those of single tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from sglang_dflash.plugins.repairs import token_events
from sglang_dflash.plugins.repairs.token_events import TokenEvents
from tests.conftest import FUZZ
from tests.plugins.repairs import detokenized
from tests.plugins.repairs.detokenized import (
    END,
    REQUEST,
    Answer,
    answer,
    blocks,
    detokenize,
    events,
    streamed,
)
from tests.plugins.repairs.tool_conversations import conversation, tokenizer
from tests.plugins.repairs.tool_formats import FORMATS, JSON_ARRAY

# Characters of one to four bytes, of which the tokenizers know few as a whole.
CHARACTERS = "abc  \n,.<>{}éßñ日本語ไทย한국🙂🤖👩‍🚀"
TEXTS = 40
# Of ten tokens, each a byte.
CHINESE = "日語éé"


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(CHARACTERS, k=rng.randint(1, 40)))


def byte_level() -> PreTrainedTokenizerFast:
    return detokenized.tokenizer_of(["abc abc <tag> a, b."], 1)


def with_spaces() -> PreTrainedTokenizerFast:
    """Return a tokenizer like SentencePiece's: a word begins with its space, which a text's first
    word loses, and unknown characters are bytes."""
    space = "▁"
    made = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    known = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(["abc abc, a.b <> {}"], BpeTrainer(special_tokens=known))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def split(
    tokenizer: PreTrainedTokenizerFast, of: Answer, sizes: list[int], incremental: bool
) -> list[dict[str, Any]]:
    """The events of an answer, after ours. An event has a log-probability per token."""
    (texts,) = detokenize(tokenizer, [of], [sizes])
    stream = TokenEvents(detokenized.manager(tokenizer, incremental), REQUEST)
    found, done = [], 0
    for event, size in zip(events(of, sizes, texts, incremental), sizes, strict=True):
        begin, done = done, done + size
        info = event["meta_info"]
        info["output_token_logprobs"] = list(range(begin if incremental else 0, done))
        info["output_token_logprobs_length"] = done
        found += stream.split(event)
    return found


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("make", [byte_level, with_spaces])
def test_events_are_those_of_single_tokens(make: Any, incremental: bool) -> None:
    """They have the same texts, tokens, log-probabilities, counts and finish."""
    tokenizer, rng = make(), random.Random(0)
    for _ in range(TEXTS):
        of = answer(tokenizer, random_text(rng), rng)
        alone, several = (
            split(tokenizer, of, sizes, incremental)
            for sizes in ([1] * len(of.ids), blocks(len(of.ids), rng))
        )
        if not incremental:
            for event in several:
                # What of them is read.
                info = event["meta_info"]
                every = info["output_token_logprobs"]
                info["output_token_logprobs"] = every[: info["output_token_logprobs_length"]]
        assert several == alone


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", [*FORMATS, "json-array"])
def test_parsers_of_tool_calls_get_the_texts_of_single_tokens(name: str, step: int) -> None:
    """So they find the same calls. All tags are single tokens, or half are."""
    rng, form = random.Random(f"{name} {step}"), FORMATS.get(name, JSON_ARRAY)
    drawn = (conversation(form, rng) for _ in range(3 * TEXTS * FUZZ))
    texts = [text for text in drawn if text]
    for alone, several in streamed(tokenizer(step), texts, rng):
        assert several == alone


@pytest.mark.parametrize("sizes", [[1, 3, 5, 1], [1, 9]])
def test_a_text_is_sent_once(sizes: list[int]) -> None:
    assert "".join(two_halves(sizes, row=True)) == CHINESE


def test_text_is_sent_twice_without_the_row() -> None:
    """The second event ends after 日 and part of a character, the third in another."""
    assert "".join(two_halves([1, 3, 5, 1], row=False)) == "日" + CHINESE


def two_halves(sizes: list[int], row: bool) -> list[str]:
    tokenizer = byte_level()
    of = Answer(tokenizer(CHINESE)["input_ids"], {"type": "length", "length": 10})
    return detokenize(tokenizer, [of], [sizes], row)[0]


def test_an_answer_without_whole_characters_comes_in_time() -> None:
    """Bytes that are no character, without end."""
    tokenizer = byte_level()
    half = tokenizer("é")["input_ids"][0]
    of = Answer([half] * 600, {"type": "length", "length": 600})
    sizes = [1] + [7] * 85 + [4]
    (texts,) = detokenize(tokenizer, [of], [sizes])
    stream = TokenEvents(detokenized.manager(tokenizer), REQUEST)
    late, sent = 0, 0
    for event in events(of, sizes, texts):
        sent += len(stream.split(event))
        late = max(late, event["meta_info"]["completion_tokens"] - sent)
    assert sent == 600 and late <= token_events.MOST_WAITING


def test_a_stop_that_was_cut_off_is_not_sent() -> None:
    """The detokenizer cuts a stop string off: the last tokens have no text."""
    tokenizer = byte_level()
    ids = tokenizer("abc abc, STOP")["input_ids"]
    of = Answer(ids, {"type": "stop", "matched": "STOP"})
    found = split(tokenizer, of, [1, len(ids) - 1], False)
    assert len(found) == len(ids) and found[-1]["text"] == "abc abc, "
    assert [event["meta_info"]["finish_reason"] for event in found[:-1]] == [None] * (len(ids) - 1)


@pytest.mark.parametrize("incremental", [False, True])
def test_an_aborted_answer_is_passed_on_as_it_is(incremental: bool) -> None:
    """SGLang repeats the last token of it. What waits comes first."""
    tokenizer = byte_level()
    ids = tokenizer("abc é")["input_ids"][:-1]
    stream = TokenEvents(detokenized.manager(tokenizer, incremental), REQUEST)
    info = {"id": "r", "finish_reason": None, "completion_tokens": len(ids)}
    waits = {"text": "abc ", "output_ids": ids, "meta_info": info}
    aborted = {**waits, "output_ids": ids[-1:], "meta_info": {"finish_reason": {"type": "abort"}}}
    assert stream.split(waits) == []
    assert stream.split(aborted) == [waits, aborted]
