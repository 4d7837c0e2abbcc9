"""Random answers as the processes before the front ends make events of them."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sglang_dflash.plugins.repairs import sent_text
from sglang_dflash.plugins.repairs.token_events import TokenEvents
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.patches.originals import original

END = "<|im_end|>"
DECODE = "sglang.srt.managers.detokenizer_manager.DetokenizerManager._decode_batch_token_id_output"
TAG = re.compile(r"\]?<[^<>\s\"]{2,40}>\[?>?\[?|\[TOOL_CALLS\]")
# Tokens of an event.
MOST = 16
# What a front end asks for that parses tool calls.
REQUEST = SimpleNamespace(sampling_params={"skip_special_tokens": False}, stream=True)


class Answer(NamedTuple):
    """A model's answer.

    Attributes:
        ids: its tokens.
        finish: why it ended, as the scheduler tells it.
    """

    ids: list[int]
    finish: dict[str, Any]


def tokenizer_of(texts: Iterable[str], step: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model that writes such texts. One in `step` tags is a token, the
    others are several."""
    texts = list(texts)
    made = Tokenizer.from_file(str(demo_pair("dense").target / "tokenizer.json"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tags = sorted({tag for text in texts for tag in TAG.findall(text)})[::step]
    kept = [AddedToken(END, special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=alphabet, special_tokens=kept, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def answer(tokenizer: PreTrainedTokenizerFast, text: str, rng: random.Random) -> Answer:
    """One in four ends at its length, and may end inside a character."""
    ids = tokenizer(text)["input_ids"]
    if rng.random() < 0.25:
        return Answer(ids, {"type": "length", "length": len(ids)})
    end = tokenizer.eos_token_id
    return Answer([*ids, end], {"type": "stop", "matched": end})


def blocks(count: int, rng: random.Random) -> list[int]:
    """Sizes of events of that many tokens: a prefill's one, then blocks."""
    sizes = [1]
    while sum(sizes) < count:
        sizes.append(min(rng.randint(1, MOST), count - sum(sizes)))
    return sizes


def detokenize(
    tokenizer: PreTrainedTokenizerFast,
    answers: list[Answer],
    sizes: list[list[int]],
    row: bool = True,
) -> list[list[str]]:
    """Return the text of each event that SGLang's detokenizer sends, of all answers in one batch,
    with our row or without."""
    decode = original(DECODE)
    detokenizer = DetokenizerManager.__new__(DetokenizerManager)
    detokenizer.tokenizer, detokenizer.vocab_size = tokenizer, len(tokenizer)
    detokenizer.decode_status = OrderedDict()
    detokenizer.disable_tokenizer_batch_decode = False
    detokenizer.is_tool_call_parser_gpt_oss, detokenizer.tool_close_token_ids = False, set()
    texts: list[list[str]] = [[] for _ in answers]
    # The prompt's last token comes first.
    prompt = tokenizer("\n")["input_ids"]
    done = [0] * len(answers)
    for step in range(max(map(len, sizes))):
        going = [i for i, own in enumerate(sizes) if step < len(own)]
        new = []
        for i in going:
            begin, done[i] = done[i], done[i] + sizes[i][step]
            new.append((prompt if begin == 0 else []) + answers[i].ids[begin : done[i]])
        last = [step == len(sizes[i]) - 1 for i in going]
        batch = SimpleNamespace(
            rids=going,
            decoded_texts=[""] * len(going),
            decode_ids=new,
            read_offsets=[len(prompt)] * len(going),
            finished_reasons=[
                answers[i].finish if ended else None for i, ended in zip(going, last, strict=True)
            ],
            no_stop_trim=[False] * len(going),
            skip_special_tokens=[False] * len(going),
            spaces_between_special_tokens=[True] * len(going),
        )
        args = (detokenizer, batch)
        sent = sent_text.send_once(decode, *args) if row else decode(*args)
        for i, text in zip(going, sent, strict=True):
            texts[i].append(text)
    return texts


def events(
    of: Answer, sizes: list[int], texts: list[str], incremental: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the answer's events as `TokenizerManager.generate_request` does."""
    done, text = 0, ""
    for i, (size, new) in enumerate(zip(sizes, texts, strict=True)):
        begin, done, text = done, done + size, text + new
        info = {
            "id": "r",
            "finish_reason": of.finish if i == len(sizes) - 1 else None,
            "prompt_tokens": 1,
            "completion_tokens": done,
            "cached_tokens": 0,
            # The first half is reasoning.
            "reasoning_tokens": min(done, len(of.ids) // 2),
        }
        yield {
            "text": new if incremental else text,
            "output_ids": of.ids[begin if incremental else 0 : done],
            "meta_info": info,
        }


def manager(tokenizer: PreTrainedTokenizerFast, incremental: bool = False) -> Any:
    """Make a `TokenizerManager` of SGLang's with the attributes that are read."""
    made = TokenizerManager.__new__(TokenizerManager)
    made.tokenizer, made.preferred_sampling_params = tokenizer, None
    made.incremental_streaming_output = incremental
    return made


def deltas(events: list[dict[str, Any]]) -> list[str]:
    """The new text of each, where each has the whole text."""
    ends = [0, *(len(event["text"]) for event in events)]
    return [event["text"][end:] for event, end in zip(events, ends, strict=False)]


def streamed(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], rng: random.Random
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield a parser's input for answers with these texts: by events of one token, and ours by
    events of 1 to 16."""
    answers = [answer(tokenizer, text, rng) for text in texts]
    ones = [[1] * len(one.ids) for one in answers]
    sizes = [blocks(len(one.ids), rng) for one in answers]
    alone, several = (detokenize(tokenizer, answers, each) for each in (ones, sizes))
    of = manager(tokenizer)
    for one, single, size, block in zip(answers, alone, sizes, several, strict=True):
        stream = TokenEvents(of, REQUEST)
        given = [new for event in events(one, size, block) for new in stream.split(event)]
        yield single, deltas(given)
